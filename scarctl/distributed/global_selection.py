"""One selection over the partitions of all ranks, from sums of small histograms: pure, no I/O, no clock.

Every rank has its candidates in an order, by falling key, and all together want the longest prefix of the common
order that the global budget allows: what `policy.select` takes of one session. They find where it ends like a radix
select does, but add up their histograms in place of the keys. A histogram is of bytes by key, 2,048 bins of 8 bytes
whatever the number of partitions and of ranks: first by the leading bits of the key, then by the next bits of the
keys in the bin where the budget ends, then there by a seeded hash, because keys may be equal. What is left of that
bin then, at most `TOLERANCE` of the budget or a partition that does not fit, is left out, and its bytes are credit
for the next round: the budget is never exceeded.

A key is a float's bits, which are ordered like positive floats: no range has to be agreed on beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.policy.select import bytes_by_digit
from scarctl.state.layout import mix64
from scarctl.util.arrays import Ids

Keys = NDArray[np.uint64]

BITS = 11
BINS = 1 << BITS
"""Of a histogram."""
LEVELS = 4
"""Histograms of one round at most: by key, by key, by hash, by hash."""
TOLERANCE = 1 / 200
"""Of the budget: a bin with no more bytes is not looked into."""

POLICIES = ("priority", "round", "random")
"""Those that need other ranks: "full" takes everything."""

MOST, SUMS = 2, 2
"""Numbers in a turn of which all ranks need the largest; sums before the bins."""

_FORCED = 1 << 63
"""Keys of partitions that are too stale are above all others: the sign bit is free."""
_END = 1 << 64
_LEADING = 15  # bits of a key that the first histogram looks at: sign, exponent, an eighth of an octave


def _first_bins() -> Ids:
    """Leading bits at which the bins of the first histogram start, ascending: int64 of shape (BINS,).

    Scores have eight bins per octave from 2**-112 to 2**112, staleness the same from 1 to 2**32. What is outside is
    in the first or last bin, which the next histogram takes apart.
    """
    one, forced = 1023 << 3, 1 << (_LEADING - 1)
    scores = np.arange(one - (112 << 3), one - (112 << 3) + 1791)
    stale = np.arange(forced + one, forced + one + 255)
    return np.concatenate(([0], scores, [forced], stale)).astype(np.int64)


_FIRST = _first_bins()


class Offer:
    """The candidates of one rank."""

    def __init__(
        self,
        policy: str,
        *,
        distance_sq: NDArray[np.float64],
        nbytes: Ids,
        staleness: Ids,
        eligible: NDArray[np.bool_],
        shard: int,
        seed: int = 0,
        step: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        """Arrays have shape (partitions,); for their meaning see `policy.select`.

        policy: "priority": largest squared distance per byte first. "random": a hash of (seed, step, shard, id).
            "round": those first that were not saved for the longest time; where all have changed that is a round
            through the partitions of all ranks, and there is no place in it that ranks would have to agree on.
        shard: of this rank. No two have the same, and it stays the same, so that picks do.

        Raises UsageError for another policy, and arrays of different shapes.
        """
        if policy not in POLICIES:
            raise UsageError(f"policy {policy!r} is not shared by ranks", hint=f"use {', '.join(POLICIES)}")
        if not distance_sq.shape == nbytes.shape == staleness.shape == eligible.shape:
            raise UsageError("the arrays of partitions have different shapes")
        finite = np.isfinite(distance_sq)
        self.nonfinite: Ids = np.flatnonzero(eligible & ~finite)
        """Eligible partitions left out because their distance is NaN or infinite, ascending."""
        self.ids: Ids = np.flatnonzero(eligible & finite & (distance_sq > 0))
        """Candidates, ascending."""
        self.nbytes = nbytes
        """Of all partitions."""
        self.largest = int(nbytes.max(initial=0))
        self._salt = _mixed(_mixed(_mixed(seed) ^ step) ^ shard)
        self.keys: Keys = self._keys(policy, distance_sq, staleness)
        """Parallel to `ids`, the larger the sooner."""
        if max_staleness is not None:
            due = staleness[self.ids] >= max_staleness
            self.keys[due] = _positive(staleness[self.ids[due]]) | np.uint64(_FORCED)

    def _keys(self, policy: str, distance_sq: NDArray[np.float64], staleness: Ids) -> Keys:
        if policy == "priority":
            return (distance_sq[self.ids] / np.maximum(self.nbytes[self.ids], 1)).view(np.uint64)
        if policy == "round":
            return _positive(staleness[self.ids])
        # Not the bits that decide between equal keys.
        return ((_hashes(self.ids, ~self._salt) >> np.uint64(11)) * 2.0**-53).view(np.uint64)

    def hashes(self, ids: Ids) -> Keys:
        """What decides between equal keys, the larger the sooner: uint64 of the shape of `ids`."""
        return _hashes(ids, self._salt)


def no_offer() -> Offer:
    """Of a rank that has nothing to save now."""
    none = np.empty(0, dtype=np.int64)
    return Offer("priority", distance_sq=np.empty(0), nbytes=none, staleness=none, eligible=none > 0, shard=0)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Where the picks of a round end, the same on all ranks."""

    above: int
    """Keys from here on are picked,"""
    low: int
    """and of keys from here on"""
    spread: int
    """those whose hash is at least this. All are at most 2**64."""
    taken: int
    """Bytes that all ranks pick."""


class Search:
    """Looks for the threshold: hand it the sum of all ranks' `histogram()` until `done`.

    All ranks get the same sums, so that they take the same decisions. `own` is what this rank picks so far, in bytes.
    """

    def __init__(self, offer: Offer, room: int | None = None) -> None:
        """room: bytes that may be picked; to be set before the first `narrow`."""
        self.room = room
        self.done = False
        self.own = 0
        self._offer = offer
        self._ids, self._keys = offer.ids, offer.keys
        self._level = 0
        self._taken = 0
        self._low, self._high = 0, _END
        self._spread_low, self._spread_high = 0, _END
        self._bins = np.empty(0, dtype=np.int64)

    @property
    def threshold(self) -> Threshold:
        return Threshold(self._high, self._low, self._spread_high, self._taken)

    def histogram(self) -> Ids:
        """Bytes of this rank's candidates that are not decided yet, by bin: int64 of shape (BINS,)."""
        if self._level == 0:
            totals = bytes_by_digit(self._ids, self._keys, self._offer.nbytes, 64 - _LEADING, _LEADING)
            totals = np.add.reduceat(totals, _FIRST)
        else:
            keys = self._keys - np.uint64(self._start())
            totals = bytes_by_digit(self._ids, keys, self._offer.nbytes, self._shift(), BITS)
        self._bins = totals.astype(np.int64)
        return self._bins

    def narrow(self, summed: Ids) -> None:
        """Take in the sum over all ranks of the newest histogram: int64 of shape (BINS,)."""
        assert self.room is not None
        assert not self.done
        reaching = np.cumsum(summed[::-1])[::-1]  # bytes of this bin and all above it
        edge = int(np.count_nonzero(reaching > self.room - self._taken)) - 1
        self._taken += int(summed[edge + 1 :].sum())
        self.own += int(self._bins[edge + 1 :].sum())
        self._enter(edge)
        self._level += 1
        self.done = edge < 0 or self._level == LEVELS or bool(summed[edge] <= TOLERANCE * self.room)
        if self.done:
            self._ids, self._keys = self._ids[:0], self._keys[:0]

    def _enter(self, edge: int) -> None:
        """Go on in one bin; -1: there is none, all of them are in."""
        by_hash = self._level >= 2
        if edge < 0:
            low = high = self._start()
        elif self._level == 0:
            low = int(_FIRST[edge]) << (64 - _LEADING)
            high = int(_FIRST[edge + 1]) << (64 - _LEADING) if edge + 1 < BINS else _END
        else:
            low = self._start() + (edge << self._shift())
            high = low + (1 << self._shift())
        if by_hash:
            self._spread_low, self._spread_high = low, high
        else:
            self._low, self._high = low, high
        inside = _at_least(self._keys, low) & ~_at_least(self._keys, high)
        self._ids, self._keys = self._ids[inside], self._keys[inside]
        if self._level == 1:
            self._keys = self._offer.hashes(self._ids)

    def _start(self) -> int:
        return self._spread_low if self._level >= 2 else self._low

    def _shift(self) -> int:
        """Bits of a bin, of which there are BINS between the ends of what is looked into."""
        width = self._spread_high - self._spread_low if self._level >= 2 else self._high - self._low
        return max(0, (width - 1).bit_length() - BITS)


def pick(offer: Offer, threshold: Threshold) -> Ids:
    """Partitions of one rank that it saves: ids, ascending."""
    above = _at_least(offer.keys, threshold.above)
    cell = np.flatnonzero(_at_least(offer.keys, threshold.low) & ~above)
    if cell.size and threshold.spread < _END:
        above[cell] = _at_least(offer.hashes(offer.ids[cell]), threshold.spread)
    return offer.ids[above]


def pick_alone(offer: Offer, room: int) -> Ids:
    """The same for a rank that has nobody to ask: at most `room` bytes of its own. Ids, ascending."""
    search = Search(offer, max(0, room))
    while not search.done:
        search.narrow(search.histogram())
    return pick(offer, search.threshold)


class Books:
    """Budget and credit of all ranks together. Every rank keeps the same, from the same sums."""

    def __init__(self) -> None:
        self.room = 0
        """Bytes that the newest round might pick."""
        self.cap: int | None = None
        """The largest credit that it could leave; None before the first."""
        self.budget = 0
        """Of all ranks in the newest round, without credit."""
        self.taken = 0
        """Bytes that it picked."""
        self.share: float | None = None
        """Of `taken`, this rank's: in the newest round in which it had something to offer."""

    @property
    def credit(self) -> int:
        """Bytes left by the newest round, as far as everybody picked what it said."""
        return min(self.room - self.taken, self.cap or 0)

    def open(self, *, budget: int, spent: int, largest: int, credit: int) -> int:
        """Begin a round; returns its room, in bytes.

        budget, spent: sums over ranks, of bytes for this round and of those really picked since the last one: a rank
        that was late did not pick what the round said, and what one exceeds all make up for. largest, credit: the
        largest partition and the largest credit that a rank had when it started.
        """
        carried = credit if self.cap is None else min(self.room - spent, self.cap)
        self.cap = budget + largest
        self.budget, self.taken = budget, 0
        self.room = max(0, budget + min(carried, self.cap))
        return self.room


class Turn:
    """One rank's part in one round: what it sends, and what it makes of what comes back, up to LEVELS times."""

    def __init__(self, books: Books, offer: Offer, *, budget: int, spent: int = 0, credit: int = 0) -> None:
        """budget: bytes, this rank's. spent: bytes that it picked since the last round. credit: see `Books.open`."""
        self.offer = offer
        self.budget = budget
        self.spent = spent
        self.credit = credit
        self._books = books
        self._search = Search(offer)

    def send(self) -> tuple[Ids, Ids]:
        """Two int64 arrays, of shapes (MOST,) and (SUMS + BINS,).

        Of the first all ranks need the largest of each, of the second the sums.
        """
        most = np.array((self.offer.largest, self.credit), dtype=np.int64)
        return most, np.concatenate(((self.budget, self.spent), self._search.histogram()))

    def receive(self, most: Ids, sums: Ids) -> bool:
        """Take in what all ranks' `send` came to; returns whether there has to be another."""
        search, books = self._search, self._books
        if search.room is None:
            budget, spent = sums[:SUMS].tolist()
            largest, credit = most.tolist()
            search.room = books.open(budget=budget, spent=spent, largest=largest, credit=credit)
        search.narrow(sums[SUMS:])
        if search.done:
            books.taken = search.threshold.taken
            if self.offer.ids.size and books.taken:
                books.share = search.own / books.taken
        return not search.done

    @property
    def threshold(self) -> Threshold:
        """What the round has found. Only when it has ended."""
        assert self._search.done
        return self._search.threshold


# --- keys ---------------------------------------------------------------------------------------------------


def _at_least(keys: Keys, bound: int) -> NDArray[np.bool_]:
    if bound >= _END:
        return np.zeros(keys.shape, dtype=bool)
    return keys >= np.uint64(bound)


def _positive(values: Ids) -> Keys:
    """Bits of non-negative integers as floats, which have the same order up to 2**53."""
    return np.maximum(values, 0).astype(np.float64).view(np.uint64)


def _hashes(ids: Ids, salt: int) -> Keys:
    """Values number `ids` of splitmix64 from a state of `salt`; no two of one rank are equal."""
    z = ids.astype(np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(salt & (_END - 1))
    return mix64(z)


def _mixed(value: int) -> int:
    return int(_hashes(np.ones(1, dtype=np.int64), value)[0])
