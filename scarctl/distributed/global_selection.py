"""Select over the partitions of all ranks, from sums of small histograms: pure, no I/O, no clock.

Every rank orders its candidates by falling key. Together the ranks want the longest prefix of the common order that
fits the global budget, as `policy.select` takes it for one session. They find its end like a radix select, but add up
histograms instead of collecting keys.

A histogram counts bytes by key. It has 2,048 bins of 8 bytes, for any number of partitions and ranks. The first one
uses the leading bits of the key. The second one uses the next bits, for the keys in the bin where the budget ends.
The next ones split that bin by a seeded hash, because keys may be equal.

The rest of the last bin is left out: at most `TOLERANCE` of the budget, or a partition that does not fit. Its bytes
are credit for the next round, and the budget is never exceeded.

A key consists of the bits of a float, which are ordered like positive floats: ranks need not agree on a range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.policy.select import URGENT, Candidates, bytes_by_digit, urgency
from scarctl.util.arrays import Ids
from scarctl.util.splitmix import splitmix64

Keys = NDArray[np.uint64]

BITS = 11
BINS = 1 << BITS
"""Bins of a histogram."""
LEVELS = 4
"""Most histograms of one round: two by key, two by hash."""
TOLERANCE = 1 / 200
"""Fraction of the budget: a bin with at most this many bytes is not split further."""

POLICIES = (*URGENT, "round", "random")
"""Policies that need other ranks. "full" does not: it takes everything."""

MOST, SUMS = 2, 2
"""Count of numbers in a turn whose maximum all ranks need; count of sums that precede the bins."""

_FORCED = 1 << 63
"""Bit in the keys of partitions that are too stale, which puts them above all others: the sign bit is free."""
_END = 1 << 64
_LEADING = 15  # bits of a key that the first histogram uses: sign, exponent, an eighth of an octave


def _first_bins() -> Ids:
    """Return the leading bits at which the bins of the first histogram start, ascending: int64 of shape (BINS,).

    Scores have eight bins per octave from 2**-112 to 2**112, staleness the same from 1 to 2**32. Keys outside are in
    the first or last bin, which the next histogram splits.
    """
    one, forced = 1023 << 3, 1 << (_LEADING - 1)
    scores = np.arange(one - (112 << 3), one - (112 << 3) + 1791)
    stale = np.arange(forced + one, forced + one + 255)
    return np.concatenate(([0], scores, [forced], stale)).astype(np.int64)


_FIRST = _first_bins()


class Offer:
    """The candidates of one rank."""

    def __init__(self, policy: str, among: Candidates, *, shard: int) -> None:
        """Order a rank's partitions.

        policy: the order of the candidates.
            "aged", "priority": the largest `policy.select.urgency` first.
            "random": by a hash of (seed, step, shard, id).
            "round": the oldest saved copy first. If all partitions change, this visits all ranks' partitions in turn.
                Ranks then need not agree on a cursor.
        shard: number of this rank's shard. It differs between ranks and never changes, so that picks are reproducible.

        Raises UsageError for another policy.
        """
        if policy not in POLICIES:
            raise UsageError(f"ranks cannot select by policy {policy!r}", hint=f"use {', '.join(POLICIES)}")
        finite = np.isfinite(among.distance_sq)
        self.nonfinite: Ids = np.flatnonzero(among.eligible & ~finite)
        """Eligible partitions left out because their distance is NaN or infinite, ascending."""
        self.ids: Ids = np.flatnonzero(among.eligible & finite & (among.distance_sq > 0))
        """Candidates, ascending."""
        self.nbytes = among.nbytes
        """Bytes of every partition."""
        self.largest = int(self.nbytes.max(initial=0))
        self._salt = _mixed(_mixed(_mixed(among.seed) ^ among.step) ^ shard)
        self.keys: Keys = self._keys(policy, among)
        """Keys, parallel to `ids`. The largest is saved first."""
        if among.max_staleness is not None:
            due = among.staleness[self.ids] >= among.max_staleness
            self.keys[due] = _positive(among.staleness[self.ids[due]]) | np.uint64(_FORCED)

    def _keys(self, policy: str, among: Candidates) -> Keys:
        if policy in URGENT:
            return urgency(policy, among, self.ids).view(np.uint64)
        if policy == "round":
            return _positive(among.staleness[self.ids])
        # The complement of the salt: `hashes` orders equal keys, and must not depend on these keys.
        return ((splitmix64(self.ids, ~self._salt) >> np.uint64(11)) * 2.0**-53).view(np.uint64)

    def hashes(self, ids: Ids) -> Keys:
        """Return the order of partitions with equal keys, the largest first: uint64 of the shape of `ids`."""
        return splitmix64(ids, self._salt)


def no_offer() -> Offer:
    """Return the offer of a rank without candidates."""
    none = np.empty(0, dtype=np.int64)
    nobody = Candidates(distance_sq=np.empty(0), nbytes=none, staleness=none, eligible=none > 0)
    return Offer("priority", nobody, shard=0)


@dataclass(frozen=True, slots=True)
class Threshold:
    """The smallest key that a round picks, equal on all ranks. All bounds are at most 2**64."""

    above: int
    """Every key of at least this is picked."""
    low: int
    """Keys from this up to `above` are picked if their hash is at least `spread`."""
    spread: int
    """The smallest hash that is picked among keys from `low` up to `above`."""
    taken: int
    """Bytes that all ranks pick."""


class Search:
    """Search for the threshold: give it the sum of all ranks' `histogram()` until `done`.

    All ranks get the same sums, so they make the same decisions. `own`: bytes that this rank has picked so far.
    """

    def __init__(self, offer: Offer, room: int | None = None) -> None:
        """Begin with all candidates. room: bytes that may be picked; if None, set it before the first `narrow`."""
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
        """Return the bytes of this rank's undecided candidates by bin: int64 of shape (BINS,)."""
        if self._level == 0:
            totals = bytes_by_digit(self._ids, self._keys, self._offer.nbytes, 64 - _LEADING, _LEADING)
            totals = np.add.reduceat(totals, _FIRST)
        else:
            keys = self._keys - np.uint64(self._start())
            totals = bytes_by_digit(self._ids, keys, self._offer.nbytes, self._shift(), BITS)
        self._bins = totals.astype(np.int64)
        return self._bins

    def narrow(self, summed: Ids) -> None:
        """Continue with the sum over all ranks of the newest histogram: int64 of shape (BINS,)."""
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
        """Continue in one bin. edge: its index; -1: all bins are picked, and the search ends."""
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
        """Return the width of a bin, as bits: the current range has BINS of them."""
        width = self._spread_high - self._spread_low if self._level >= 2 else self._high - self._low
        return max(0, (width - 1).bit_length() - BITS)


def pick(offer: Offer, threshold: Threshold) -> Ids:
    """Return the partitions that a rank saves: ids, ascending."""
    above = _at_least(offer.keys, threshold.above)
    cell = np.flatnonzero(_at_least(offer.keys, threshold.low) & ~above)
    if cell.size and threshold.spread < _END:
        above[cell] = _at_least(offer.hashes(offer.ids[cell]), threshold.spread)
    return offer.ids[above]


def pick_alone(offer: Offer, room: int) -> Ids:
    """Return the partitions that a rank saves if it selects alone: at most `room` bytes. Ids, ascending."""
    search = Search(offer, max(0, room))
    while not search.done:
        search.narrow(search.histogram())
    return pick(offer, search.threshold)


class Books:
    """Budget and credit of all ranks together. Every rank keeps the same account, from the same sums."""

    def __init__(self) -> None:
        self.room = 0
        """Bytes that the newest round might pick."""
        self.cap: int | None = None
        """The largest credit that the newest round could leave; None before the first."""
        self.budget = 0
        """Budget of all ranks in the newest round, without credit."""
        self.taken = 0
        """Bytes that the newest round picked."""
        self.share: float | None = None
        """This rank's fraction of `taken`, in the newest round in which it had candidates."""

    @property
    def credit(self) -> int:
        """Bytes that the newest round left, if every rank picked its part."""
        return min(self.room - self.taken, self.cap or 0)

    def open(self, *, budget: int, spent: int, largest: int, credit: int) -> int:
        """Begin a round, and return its room in bytes.

        budget: bytes for this round, summed over ranks.
        spent: bytes picked since the last round, summed over ranks. A late rank did not pick its part of the round. If
            a rank exceeds its budget, all ranks pick less.
        largest: bytes of the largest partition of all ranks.
        credit: the largest credit that a rank started with, in bytes.
        """
        carried = credit if self.cap is None else min(self.room - spent, self.cap)
        self.cap = budget + largest
        self.budget, self.taken = budget, 0
        self.room = max(0, budget + min(carried, self.cap))
        return self.room


class Turn:
    """One rank's part in one round: it sends numbers and receives their sums, up to LEVELS times."""

    def __init__(self, books: Books, offer: Offer, *, budget: int, spent: int = 0, credit: int = 0) -> None:
        """Prepare the first `send`.

        budget: bytes that this rank may save.
        spent: bytes that it picked since the last round.
        credit: see `Books.open`.
        """
        self.offer = offer
        self.budget = budget
        self.spent = spent
        self.credit = credit
        self._books = books
        self._search = Search(offer)

    def send(self) -> tuple[Ids, Ids]:
        """Return two int64 arrays, of shapes (MOST,) and (SUMS + BINS,).

        All ranks need the elementwise maximum of the first, and the sum of the second.
        """
        most = np.array((self.offer.largest, self.credit), dtype=np.int64)
        return most, np.concatenate(((self.budget, self.spent), self._search.histogram()))

    def receive(self, most: Ids, sums: Ids) -> bool:
        """Continue with maximum and sum of all ranks' `send`. Return whether another `send` has to follow."""
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
        """Threshold of the round, once the round has ended."""
        assert self._search.done
        return self._search.threshold


# --- keys ---------------------------------------------------------------------------------------------------


def _at_least(keys: Keys, bound: int) -> NDArray[np.bool_]:
    if bound >= _END:
        return np.zeros(keys.shape, dtype=bool)
    return keys >= np.uint64(bound)


def _positive(values: Ids) -> Keys:
    """Return the bits of non-negative integers as floats. They have the order of the integers up to 2**53."""
    return np.maximum(values, 0).astype(np.float64).view(np.uint64)


def _mixed(value: int) -> int:
    return int(splitmix64(np.ones(1, dtype=np.int64), value)[0])
