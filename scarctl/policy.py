"""Which partitions a partial checkpoint saves: pure, seeded functions of arrays over all partitions.

Every policy puts the candidates in an order and takes the longest prefix of it that the byte budget allows. It
stops at the first partition that does not fit, and what is left of the budget carries over: so a partition larger
than one budget is saved when the credit covers it, and is not passed over for smaller ones for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError

POLICIES = ("priority", "round", "random", "full")

_LARGEST = 1e150
"""Larger distances have squares that no float64 holds; they all rank highest."""
_DIGIT_BITS = 16
_CHUNK = 1 << 17
"""Values per piece of a histogram, so that temporaries stay in the cache."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to save now, and what to hand to the next call."""

    ids: NDArray[np.int64]
    """Partitions to save, ascending."""
    nbytes: int
    """Their bytes."""
    credit: int
    """Bytes of the budget that carry over."""
    cursor: int
    """Where the policy `round` goes on."""
    nonfinite: NDArray[np.int64]
    """Eligible partitions that were left out because their distance is NaN or infinite, ascending."""


def squared(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squares for `select`, clipped: one that overflows would look like a value that is not finite."""
    result = np.empty_like(distance)
    for first in range(0, distance.size, _CHUNK):
        part, out = distance[first : first + _CHUNK], result[first : first + _CHUNK]
        with np.errstate(over="ignore"):
            np.square(part, out=out)
        if np.isinf(out).any():
            out[np.isinf(out) & np.isfinite(part)] = _LARGEST**2
    return result


def select(
    policy: str,
    *,
    distance_sq: NDArray[np.float64],
    nbytes: NDArray[np.int64],
    staleness: NDArray[np.int64],
    eligible: NDArray[np.bool_],
    budget: int,
    credit: int = 0,
    cursor: int = 0,
    seed: int = 0,
    step: int = 0,
    max_staleness: int | None = None,
) -> Selection:
    """Pick the partitions to save. All arrays have shape (partitions,).

    policy: "priority" takes the largest squared distance per byte first (Qiao et al., "Fault tolerance in
        iterative-convergent machine learning", ICML 2019, section 4.2, with bytes in place of counts); "round"
        goes through the ids from `cursor` on; "random" draws an order from (seed, step); "full" takes all that is
        eligible, whatever the budget.
    distance_sq: squared distance from the last saved copy. Where it is zero there is nothing to save, and only
        "full" saves it. Where it is not finite, no policy does: the last good copy is worth more.
    staleness: iterations since the last saved copy.
    eligible: owned, and with no copy under way.
    budget, credit: bytes. At most budget + credit are picked. What is left carries over, but never more than one
        budget and the largest partition.
    max_staleness: partitions that changed and are at least so stale go first, the stalest first.

    Equal partitions are taken in the order of their ids. Time is linear in the number of partitions. Raises UsageError
    for an unknown policy, a negative budget, and arrays of different shapes.
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", hint=f"use one of {', '.join(POLICIES)}")
    if budget < 0:
        raise UsageError(f"a budget of {budget} bytes is negative")
    n = distance_sq.size
    if not distance_sq.shape == nbytes.shape == staleness.shape == eligible.shape == (n,):
        raise UsageError("the arrays of partitions have different shapes")

    ids, nonfinite = _candidates(distance_sq, eligible, equal_too=policy == "full")
    if policy == "full":
        return Selection(ids, int(nbytes[ids].sum()), credit, cursor, nonfinite)

    cap = budget + int(nbytes.max(initial=0))
    room = budget + min(max(credit, 0), cap)
    stale = np.empty(0, dtype=np.int64)
    if max_staleness is not None:
        is_due = staleness[ids] >= max_staleness
        due = ids[is_due]
        stale = _prefix(due, staleness[due].astype(np.uint64), nbytes, room)
        # Where one that is due did not fit, all others wait until the credit covers it.
        ids = ids[~is_due] if stale.size == due.size else np.empty(0, dtype=np.int64)
        room -= int(nbytes[stale].sum())
    if policy == "round":
        split = np.searchsorted(ids, cursor)
        in_turn = _fitting(np.concatenate((ids[split:], ids[:split])), nbytes, room)
        if in_turn.size:
            cursor = (int(in_turn[-1]) + 1) % n
        picked = np.sort(in_turn, kind="stable")
    else:
        picked = _prefix(ids, _keys(policy, ids, distance_sq, nbytes, seed, step), nbytes, room)
    room -= int(nbytes[picked].sum())
    taken = np.sort(np.concatenate((stale, picked))) if stale.size else picked
    return Selection(taken, int(nbytes[taken].sum()), min(room, cap), cursor, nonfinite)


def _candidates(
    distance_sq: NDArray[np.float64], eligible: NDArray[np.bool_], *, equal_too: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Eligible ids that have changed, or all that are finite; and those that are not finite. Both ascending."""
    found, bad = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for first in range(0, distance_sq.size, _CHUNK):
        values, may = distance_sq[first : first + _CHUNK], eligible[first : first + _CHUNK]
        finite = np.isfinite(values)
        if not finite.all():
            bad.append(np.flatnonzero(may & ~finite) + first)
        found.append(np.flatnonzero(may & finite if equal_too else may & finite & (values > 0)) + first)
    return np.concatenate(found), np.concatenate(bad)


def _keys(
    policy: str,
    ids: NDArray[np.int64],
    distance_sq: NDArray[np.float64],
    nbytes: NDArray[np.int64],
    seed: int,
    step: int,
) -> NDArray[np.uint64]:
    """A number per candidate, the larger the sooner: uint64 of shape (candidates,)."""
    if policy == "priority":
        # Positive floats are ordered like their bits. A partition without bytes counts as one byte.
        keys = distance_sq[ids]
        keys /= np.maximum(nbytes[ids], 1)
        return keys.view(np.uint64)
    # Raw output of a bit generator, which numpy keeps the same for ever. Drawn for all ids, so that an id's place
    # does not depend on what else is a candidate.
    entropy = np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, step])
    return np.random.PCG64(entropy).random_raw(distance_sq.size)[ids]


def _prefix(
    ids: NDArray[np.int64], keys: NDArray[np.uint64], nbytes: NDArray[np.int64], room: int
) -> NDArray[np.int64]:
    """The longest prefix, in order of falling keys and then rising ids, with at most `room` bytes; ascending.

    A radix select, one digit of the keys at a time, from the first: ids with a larger digit than the first that
    does not fit are in, and those with the same digit are looked at again. Unlike sorting it is linear.
    """
    taken = []
    while ids.size:
        low, high = int(keys.min()), int(keys.max())
        if low == high:
            ids = _fitting(ids, nbytes, room)
            break
        bits = min(_DIGIT_BITS, ids.size.bit_length())
        shift = max(
            0, (low ^ high).bit_length() - bits
        )  # all bits before this digit are the same in all keys
        totals = bytes_by_digit(ids, keys, nbytes, shift, bits)
        reaching = np.cumsum(totals[::-1])[::-1]  # bytes of this digit and of all larger ones
        edge = int(np.count_nonzero(reaching > room)) - 1
        if edge < 0:
            break
        # What comes before the digit is the same in all keys, so keys are ordered like it.
        least = ((low >> shift >> bits << bits) + edge) << shift
        in_or_same = np.flatnonzero(keys >= np.uint64(least))
        ids, keys = ids[in_or_same], keys[in_or_same]
        same = keys - np.uint64(least) < np.uint64(1 << shift)
        taken.append(ids[~same])
        room -= int(totals[edge + 1 :].sum())
        ids, keys = ids[same], keys[same]
    # The sort is a merge of the few pieces, each ascending.
    return np.sort(np.concatenate([*taken, ids]), kind="stable")


def _fitting(ids: NDArray[np.int64], nbytes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """The longest prefix of `ids`, as they stand, with at most `room` bytes."""
    return ids[: np.searchsorted(np.cumsum(nbytes[ids]), room, side="right")]


def bytes_by_digit(
    ids: NDArray[np.int64], keys: NDArray[np.uint64], nbytes: NDArray[np.int64], shift: int, bits: int
) -> NDArray[np.float64]:
    """Bytes of the candidates by the digit of `bits` bits in their key, exact below 2**53: shape (2**bits,)."""
    totals = np.zeros(1 << bits)
    for first in range(0, ids.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        digits = ((keys[part] >> np.uint64(shift)) & np.uint64((1 << bits) - 1)).astype(np.intp)
        totals += np.bincount(digits, weights=nbytes[ids[part]], minlength=totals.size)
    return totals
