"""Hold the state that a shard's log describes: each member's newest saved copy (docs/FORMAT.md, section 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, UsageError
from scarctl.state.encoding import encoded_groups, stored_as
from scarctl.state.encodings import ENCODINGS
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER
from scarctl.store.format import corrupt
from scarctl.store.record import Record
from scarctl.store.segment import SegmentRef, Tail, positions
from scarctl.util.arrays import Ids, adjacent

KEEP_SEALED = 4096


@dataclass(frozen=True, slots=True)
class Damage:
    """A record whose segment's list of partitions cannot be read, or which cannot be read itself."""

    seq: int
    file: str
    reason: str
    sealed: bool
    """Whether the record has sealed a state, or may have."""
    error: Corruption | None = None
    """The error of reading the record itself; None: only its segment is damaged."""

    @property
    def why(self) -> str:
        """The reason without the file's name."""
        return self.reason.removeprefix(f"{self.file}: ")

    @property
    def base(self) -> None:
        """Return None: see `Record.base`. A damaged record may have been a rollback."""


class Seal(NamedTuple):
    """A sealed record of a log."""

    seq: int
    epoch: int
    step: int
    whole: str = ""
    """See `Record.whole`."""


@dataclass
class ShardState:
    """State of one shard after record `seq` (-1: empty log). Arrays are over the members, in ascending id order.

    version, segment: -1: never saved. `segment` is an index into `segments`.
    position: the ordinal of the partition among its segment's partitions of its group.
    doubt: marks members that may have had a newer copy in a damaged segment (`damaged`).
    step: step of the newest commit, -1 before the first.
    sealed: the sealed records.
    whole: name of the commit of the whole state that has all copies, "" if they are of several.
    extras: (version, index of the segment). `extras_whole` is the name of the extras' commit.
    records: number of the log's files.
    line: see `scarctl.store.line`; "" if unknown.
    unindexed_records, unindexed: the records since the last index, and the partitions in them.
    past: whether this is the state after a requested record, not the newest one.
    """

    shard: int
    layout: Layout | None = None
    seq: int = -1
    epoch: int = 0
    step: int = -1
    tail_digest: str = ""
    records: int = 0
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    version: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    segment: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    position: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    checksum: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    doubt: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    segments: list[SegmentRef] = field(default_factory=list)
    sealed: list[Seal] = field(default_factory=list)
    whole: str = ""
    extras_whole: str = ""
    extras: tuple[int, int] | None = None
    damaged: list[Damage] = field(default_factory=list)
    boundary: int = 0
    line: str = ""
    unindexed_records: int = 0
    unindexed: int = 0
    past: bool = False

    @property
    def saved(self) -> NDArray[np.bool_]:
        """Which members have a saved copy."""
        return self.version >= 0

    def encoding(self, at: Ids) -> NDArray[np.int8]:
        """Return the encodings of copies of members `at`, as indices into `ENCODINGS`: int8 of the shape of `at`.

        A partition that its segment's encoding leaves as it is, such as one of integers, counts as exact.
        """
        kinds = np.array([ENCODINGS.index(s.encoding) for s in self.segments] + [0], np.int8)
        if not kinds.any():
            return np.zeros(len(at), np.int8)
        found: NDArray[np.int8] = kinds[self.segment[at]]
        assert self.layout is not None
        for n in np.unique(found[found != 0]).tolist():
            mine = np.flatnonzero(found == n)
            lossy = encoded_groups(self.layout, ENCODINGS[n])[self.layout.group_of(self.ids[at[mine]])]
            found[mine[~lossy]] = 0
        return found

    @property
    def encoded(self) -> NDArray[np.bool_]:
        """Which members' newest copies are not exact."""
        if all(s.encoding == "exact" for s in self.segments):
            return np.zeros(len(self.ids), bool)
        found: NDArray[np.bool_] = self.encoding(np.arange(len(self.ids))) != 0
        return found

    def bytes_of(self, at: Ids) -> Ids:
        """Return the bytes of the stored copies of members `at`: int64 of the shape of `at`. They must be saved."""
        assert self.layout is not None
        ids, encodings = self.ids[at], self.encoding(at)
        found = self.layout.bytes_of(ids)
        if not encodings.any():
            return found
        for n in np.unique(encodings[encodings != 0]).tolist():
            found[encodings == n] = stored_as(self.layout, ENCODINGS[n]).bytes_of(ids[encodings == n])
        return found

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """Return the indices of `ids` in the arrays, -1 for ids that are not members."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        first, last = int(self.ids[0]), int(self.ids[-1])
        if last - first == len(self.ids) - 1:  # the members are contiguous: no search is needed
            at = ids - first
            at[(ids < first) | (ids > last)] = -1
            return at
        if np.array_equal(self.ids, ids):
            return np.arange(len(ids), dtype=np.int64)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, at, -1)

    def require_members(self, ids: Ids) -> Ids:
        """Return the indices of `ids` in the arrays. Raises UsageError if one is not a member."""
        at = self.find(ids)
        if len(ids) and (at < 0).any():
            raise UsageError(f"partition {int(ids[at < 0][0])} is not of shard {self.shard}")
        return at

    def require_sealable(self, at: Ids, layout: Layout) -> None:
        """Raise UsageError if a member has no known exact copy. Members at `at` are about to be saved: not checked."""
        unknown = ~self.saved | self.doubt | self.encoded
        unknown[at] = False
        if unknown.any():
            raise UsageError(
                f"shard {self.shard} cannot be sealed: {int(unknown.sum())} partitions, such as "
                f"{layout.name(int(self.ids[unknown][0]))}, have no known exact copy",
                hint="save them with this commit",
            )

    def set_members(self, ids: Ids) -> None:
        """Make `ids` (ascending) the members. Remaining members keep their copies."""
        at = self.find(ids)
        kept = at >= 0

        def carry(old: NDArray[Any], fill: int) -> NDArray[Any]:
            new = np.full(len(ids), fill, old.dtype)
            new[kept] = old[at[kept]]
            return new

        self.version = carry(self.version, NEVER)
        self.segment = carry(self.segment, -1)
        self.position = carry(self.position, -1)
        self.checksum = carry(self.checksum, 0)
        self.doubt = carry(self.doubt, 0)
        self.ids = ids.copy()

    def apply(
        self, record: Record, layout: Layout, tail: Tail | None, what: object, damage: Damage | None = None
    ) -> None:
        """Advance by one record. tail: None if the record has no segment, or a damaged one (`damage`).

        Raises Corruption if the record cannot follow this state.
        """
        line = self.line
        if self.layout is None or self.layout.digest != record.layout:
            self.__dict__.update(ShardState(self.shard, records=self.records).__dict__)
        self.layout = layout
        if damage is not None:
            self.lose(damage)
        elif tail is not None and record.kind == "epoch":
            self.whole = self.whole if np.array_equal(self.ids, tail.ids) else ""
            self.set_members(tail.ids)
        elif tail is not None and record.segment is not None:
            self._save(record, record.segment, tail, what)
        if record.kind != "epoch":
            self.step = record.step
        if record.encoded or (record.kind == "commit" and record.partitions):
            self.whole = ""
        if record.sealed:
            self._seal(record, what)
        self.boundary = record.boundary
        self.line = record.line or line
        self.unindexed_records += 1
        self.unindexed += record.partitions if record.kind != "epoch" else 0
        self.seq, self.epoch, self.tail_digest = record.seq, record.epoch, record.digest

    def lose(self, damage: Damage) -> None:
        """Note damage: any member may have had a newer copy there."""
        self.damaged.append(damage)
        self.doubt[:] = True
        self.whole = ""

    def _save(self, record: Record, segment: SegmentRef, tail: Tail, what: object) -> None:
        assert self.layout is not None
        assert tail.checksums is not None
        found = self.find(tail.ids)
        if (found < 0).any():
            raise corrupt(
                what,
                f"partition {self.layout.name(int(tail.ids[found < 0][0]))} is not of shard {self.shard}",
            )
        at = adjacent(found)
        number = len(self.segments)
        self.segments.append(segment)
        self.version[at] = record.version if tail.versions is None else tail.versions
        self.segment[at] = number
        self.position[at] = positions(self.layout, tail.ids)
        self.checksum[at] = tail.checksums
        if record.kind == "commit":  # compaction only moves copies
            self.doubt[at] = False
        if record.extras:
            self.extras = (record.version, number)
            self.extras_whole = record.identity if record.sealed else ""

    def _seal(self, record: Record, what: object) -> None:
        # A member in doubt may be equal to a lost copy. Its known copy is older, and not of this version.
        known = self.saved & ~self.doubt
        if (known & self.encoded).any():
            raise corrupt(what, "it seals a state with encoded copies, which are not exact")
        self.version[known] = record.version
        if known.all():
            self.sealed.append(Seal(record.seq, record.epoch, record.step, record.whole))
            self.whole = record.identity
            del self.sealed[:-KEEP_SEALED]

    def take_over(self, fresh: ShardState, ids: Ids) -> NDArray[np.bool_]:
        """Update the segments of `ids` from a newer state. Return which of them have moved.

        Newer copies are taken too, except by a state of the past.
        """
        found = np.zeros(len(ids), bool)
        if not len(fresh.ids):
            return found
        own, there = self.find(ids), fresh.find(ids)
        found |= (there >= 0) & (fresh.segment[there] >= 0)
        same = (fresh.version[there] == self.version[own]) & (fresh.checksum[there] == self.checksum[own])
        if not self.past:
            # After a rollback, in a later epoch, older copies are taken, too, except replacements of damaged ones.
            back = (fresh.epoch > self.epoch) & ~fresh.doubt[there]
            same |= (fresh.version[there] > self.version[own]) | back
        found &= same
        before = np.array([s.name for s in self.segments] + [""])
        after = np.array([s.name for s in fresh.segments] + [""])
        found &= before[self.segment[own]] != after[fresh.segment[there]]
        own, there = own[found], there[found]
        self.segment[own] = fresh.segment[there] + np.int32(len(self.segments))
        for name in ("version", "position", "checksum"):
            getattr(self, name)[own] = getattr(fresh, name)[there]
        self.segments = [*self.segments, *fresh.segments]
        return found

    def drop_unused_segments(self) -> None:
        """Remove segments without a newest copy. Indices of segments change."""
        used = np.zeros(len(self.segments) + 1, bool)
        used[self.segment] = True  # -1 marks the additional last entry
        if self.extras is not None:
            used[self.extras[1]] = True
        number = np.cumsum(used[:-1], dtype=np.int32) - np.int32(1)
        self.segments = [s for s, keep in zip(self.segments, used[:-1].tolist(), strict=True) if keep]
        self.segment = np.append(number, np.int32(-1))[self.segment]
        if self.extras is not None:
            self.extras = (self.extras[0], int(number[self.extras[1]]))
