"""Select the partitions that a partial checkpoint saves: pure, seeded functions of arrays over all partitions.

Every policy orders the candidates and takes the longest prefix that the byte budget allows. Selection stops at the
first partition that does not fit, and the unused budget carries over as credit. So a partition larger than one budget
is saved once the credit covers it, and smaller ones cannot displace it forever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError

POLICIES = ("aged", "priority", "round", "random", "full")

URGENT = ("aged", "priority")
"""Policies that save what is most urgent."""

_LARGEST = 1e150
"""Squares of larger distances overflow float64. Such distances all rank highest."""
_DIGIT_BITS = 16
_CHUNK = 1 << 17
"""Values per piece of a histogram, so that temporaries stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The measurements and settings that rank the partitions. All arrays have shape (partitions,).

    Raises UsageError for arrays of different shapes.
    """

    distance_sq: NDArray[np.float64]
    """Squared distance from the last saved copy. If it is zero, only "full" saves the partition. If it is not finite,
    no policy does, because the last good copy is worth more."""
    nbytes: NDArray[np.int64]
    staleness: NDArray[np.int64]
    """Iterations since the last saved copy. The policy "priority" does not use it without `max_staleness`."""
    eligible: NDArray[np.bool_]
    """Whether the partition is owned and has no pending copy."""
    seed: int = 0
    step: int = 0
    max_staleness: int | None = None
    """Changed partitions of at least this staleness come first, the stalest first. None: there is no limit."""

    def __post_init__(self) -> None:
        shape = (self.distance_sq.size,)
        if (
            not self.distance_sq.shape
            == self.nbytes.shape
            == self.staleness.shape
            == self.eligible.shape
            == shape
        ):
            raise UsageError("the arrays of partitions have different shapes")


@dataclass(frozen=True, slots=True)
class Selection:
    """The partitions to save now, and the values to pass to the next call."""

    ids: NDArray[np.int64]
    """Partitions to save, ascending."""
    nbytes: int
    """Bytes of these partitions."""
    credit: int
    """Unused bytes of the budget that carry over."""
    cursor: int
    """Partition id from which the policy `round` continues."""
    nonfinite: NDArray[np.int64]
    """Eligible partitions left out because their distance is NaN or infinite, ascending."""


def squared(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Square distances for `select`. Overflows are clipped, because `select` treats infinity as damage."""
    result = np.empty_like(distance)
    for first in range(0, distance.size, _CHUNK):
        part, out = distance[first : first + _CHUNK], result[first : first + _CHUNK]
        with np.errstate(over="ignore"):
            np.square(part, out=out)
        if np.isinf(out).any():
            out[np.isinf(out) & np.isfinite(part)] = _LARGEST**2
    return result


def urgency(policy: str, among: Candidates, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how urgent it is to save each of `ids`: float64 of their shape.

    "priority": squared distance per byte (Qiao et al., "Fault tolerance in iterative-convergent machine learning", ICML
    2019, section 4.2, with bytes in place of counts). "aged": that times the copy's age in iterations. Where squared
    distances grow like a power of the age, it is proportional to Whittle's index ("Restless bandits", 1988). So it aims
    at the least mean perturbation; docs/theory.md has the derivation.
    """
    found = among.distance_sq[ids]
    found /= np.maximum(among.nbytes[ids], 1)  # a partition without bytes counts as one byte
    if policy == "aged":
        with np.errstate(over="ignore"):
            found *= np.maximum(among.staleness[ids], 1)
    return found


def select(policy: str, among: Candidates, budget: int, *, credit: int = 0, cursor: int = 0) -> Selection:
    """Pick the partitions to save.

    policy: "aged" and "priority" take the largest `urgency` first; "round" cycles through the ids from `cursor`;
        "random" draws an order from (seed, step); "full" takes all eligible partitions, regardless of the budget.
    budget, credit: bytes. At most budget + credit are selected. The rest carries over, up to one budget plus the
        largest partition.

    Equal partitions are taken in the order of their ids. Time is linear in the number of partitions. Raises UsageError
    for an unknown policy and a negative budget.
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}", hint=f"use one of {', '.join(POLICIES)}")
    if budget < 0:
        raise UsageError(f"a budget of {budget} bytes is negative", hint="give 0 or more")
    nbytes = among.nbytes
    ids, nonfinite = _candidates(among, equal_too=policy == "full")
    if policy == "full":
        return Selection(ids, int(nbytes[ids].sum()), credit, cursor, nonfinite)

    cap = budget + int(nbytes.max(initial=0))
    room = budget + min(max(credit, 0), cap)
    stale = np.empty(0, dtype=np.int64)
    if among.max_staleness is not None:
        is_due = among.staleness[ids] >= among.max_staleness
        due = ids[is_due]
        stale = _prefix(due, among.staleness[due].astype(np.uint64), nbytes, room)
        # If a due partition did not fit, all others wait until the credit covers it.
        ids = ids[~is_due] if stale.size == due.size else np.empty(0, dtype=np.int64)
        room -= int(nbytes[stale].sum())
    if policy == "round":
        split = np.searchsorted(ids, cursor)
        in_turn = _fitting(np.concatenate((ids[split:], ids[:split])), nbytes, room)
        if in_turn.size:
            cursor = (int(in_turn[-1]) + 1) % nbytes.size
        picked = np.sort(in_turn, kind="stable")
    else:
        picked = _prefix(ids, _keys(policy, ids, among), nbytes, room)
    room -= int(nbytes[picked].sum())
    taken = np.sort(np.concatenate((stale, picked))) if stale.size else picked
    return Selection(taken, int(nbytes[taken].sum()), min(room, cap), cursor, nonfinite)


def _candidates(among: Candidates, *, equal_too: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the eligible ids that changed (or all, if `equal_too`), and those that are not finite. Both ascend."""
    found, bad = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for first in range(0, among.distance_sq.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        values, may = among.distance_sq[part], among.eligible[part]
        finite = np.isfinite(values)
        if not finite.all():
            bad.append(np.flatnonzero(may & ~finite) + first)
        found.append(np.flatnonzero(may & finite if equal_too else may & finite & (values > 0)) + first)
    return np.concatenate(found), np.concatenate(bad)


def _keys(policy: str, ids: NDArray[np.int64], among: Candidates) -> NDArray[np.uint64]:
    """Return a rank per candidate, the largest first: uint64 of shape (candidates,)."""
    if policy in URGENT:
        return urgency(policy, among, ids).view(np.uint64)  # positive floats sort like their bits
    # numpy keeps the raw output of a bit generator stable. It is drawn for all ids, so that an id's rank does not
    # depend on the other candidates.
    entropy = np.random.SeedSequence([among.seed & 0xFFFFFFFFFFFFFFFF, among.step])
    return np.random.PCG64(entropy).random_raw(among.nbytes.size)[ids]


def _prefix(
    ids: NDArray[np.int64], keys: NDArray[np.uint64], nbytes: NDArray[np.int64], room: int
) -> NDArray[np.int64]:
    """Return the longest prefix of at most `room` bytes, in order of falling keys, then rising ids; sorted by id.

    This is a radix select, by one digit of the keys at a time, the most significant first. Ids whose digit exceeds
    the first one that does not fit are in. Those with the same digit go to the next round. Unlike sorting it is linear.
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
        # All keys share the bits before this digit, so the digit orders them.
        least = ((low >> shift >> bits << bits) + edge) << shift
        in_or_same = np.flatnonzero(keys >= np.uint64(least))
        ids, keys = ids[in_or_same], keys[in_or_same]
        same = keys - np.uint64(least) < np.uint64(1 << shift)
        taken.append(ids[~same])
        room -= int(totals[edge + 1 :].sum())
        ids, keys = ids[same], keys[same]
    # A stable sort merges the few ascending pieces quickly.
    return np.sort(np.concatenate([*taken, ids]), kind="stable")


def _fitting(ids: NDArray[np.int64], nbytes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return the longest prefix of `ids`, in their given order, of at most `room` bytes."""
    return ids[: np.searchsorted(np.cumsum(nbytes[ids]), room, side="right")]


def bytes_by_digit(
    ids: NDArray[np.int64], keys: NDArray[np.uint64], nbytes: NDArray[np.int64], shift: int, bits: int
) -> NDArray[np.float64]:
    """Sum the candidates' bytes by one digit of `bits` bits of their key: float64 (2**bits,), exact below 2**53."""
    totals = np.zeros(1 << bits)
    for first in range(0, ids.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        digits = ((keys[part] >> np.uint64(shift)) & np.uint64((1 << bits) - 1)).astype(np.intp)
        totals += np.bincount(digits, weights=nbytes[ids[part]], minlength=totals.size)
    return totals
