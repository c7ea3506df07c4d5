"""Hold the state that a lane's log describes: each partition's newest saved copy (docs/FORMAT.md, section 7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, UsageError
from scarctl.state.encoding import encoded_groups, stored_as
from scarctl.state.encodings import ENCODINGS
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER
from scarctl.store.format import corrupt
from scarctl.store.record import FULL, Record
from scarctl.store.segment import SegmentRef, positions
from scarctl.store.table import KEEP_SEALED, Seal, Table, Tail
from scarctl.store.term import NO_LINE, Line, Place, split_seq
from scarctl.util.arrays import Ids, adjacent


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
    def k(self) -> int:
        """The record's number in its term."""
        return split_seq(self.seq)[1]

    @property
    def why(self) -> str:
        """The reason without the file's name."""
        return self.reason.removeprefix(f"{self.file}: ")


@dataclass
class ShardState:
    """State of one lane after the record at `place` (None: no record). Arrays are over its partitions, ascending.

    version, segment: -1: never saved. `segment` is an index into `segments`.
    position: the ordinal of the partition among its segment's partitions of its group.
    doubt: marks partitions that may have had a newer copy in a damaged segment (`damaged`).
    epoch: see `Record.epoch`. step: step of the newest commit, -1 before the first.
    seal: place of the newest consistent state. sealed: records of consistent states that are kept, oldest first.
    whole: name of the commit of the whole state that has all copies, "" if they are of several.
    extras: (version, index of the segment). `extras_whole` is the name of the extras' commit.
    full: number of the newest full record in its term. since: partitions in the records after it.
    line: see `scarctl.store.term.Line`.
    past: whether this is the state after a requested record, not the newest one.
    """

    shard: int
    layout: Layout | None = None
    place: Place | None = None
    epoch: int = 0
    step: int = -1
    digest: str = ""
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    version: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    segment: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    position: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    checksum: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    doubt: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    segments: list[SegmentRef] = field(default_factory=list)
    seal: Place | None = None
    sealed: list[Seal] = field(default_factory=list)
    whole: str = ""
    extras_whole: str = ""
    extras: tuple[int, int] | None = None
    damaged: list[Damage] = field(default_factory=list)
    line: Line = NO_LINE
    full: int = 0
    since: int = 0
    past: bool = False

    @property
    def seq(self) -> int:
        """Number of the record among all of its lane, -1 without one: see `Place.seq`."""
        return -1 if self.place is None else self.place.seq

    @property
    def records(self) -> int:
        """Number of records of this term."""
        return 0 if self.place is None else self.place.k

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
            raise UsageError(f"partition {int(ids[at < 0][0])} is not of lane {self.shard}")
        return at

    def require_sealable(self, at: Ids, layout: Layout) -> None:
        """Raise UsageError if a member has no known exact copy. Members at `at` are about to be saved: not checked."""
        unknown = ~self.saved | self.doubt | self.encoded
        unknown[at] = False
        if unknown.any():
            raise UsageError(
                f"lane {self.shard} cannot be sealed: {int(unknown.sum())} partitions, such as "
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
        """Advance by one record. tail: None if the record's segment is damaged (`damage`).

        Raises Corruption if the record cannot follow this state.
        """
        if record.kind == FULL and tail is not None and tail.table is not None:
            self._restart(record, layout, tail, tail.table)
        elif self.layout is None or self.layout.digest != record.layout:
            raise corrupt(what, "it follows no full record of its layout")
        elif tail is not None:
            self._save(record, tail, what)
        if damage is not None:
            self.lose(damage)
        if record.changes:
            self.step = record.step
        if record.sealed and damage is None:
            self._seal(record, what)
        self.place, self.epoch, self.digest, self.line, self.seal = (
            record.place,
            record.epoch,
            record.digest,
            record.line,
            record.seal,
        )

    def _restart(self, record: Record, layout: Layout, tail: Tail, table: Table) -> None:
        """Take the state from a full record alone."""
        own = tail.ids
        ids = np.concatenate([own, table.ids, table.unsaved])
        order, none = np.argsort(ids, kind="stable"), len(table.unsaved)
        versions = np.full(len(own), record.version) if tail.versions is None and len(own) else tail.versions
        versions = np.empty(0, np.int64) if versions is None else versions

        def column(first: NDArray[Any], second: NDArray[Any], fill: int) -> NDArray[Any]:
            return np.concatenate([first, second, np.full(none, fill, first.dtype)])[order]

        self.layout, self.ids = layout, ids[order]
        self.version = column(versions.astype(np.int64), table.version, NEVER)
        self.segment = column(np.zeros(len(own), np.int32), table.segment.astype(np.int32) + np.int32(1), -1)
        self.position = column(positions(layout, own), table.position, -1)
        self.checksum = column(tail.checksums, table.checksum, 0)
        self.doubt = np.isin(self.ids, table.doubt)
        self.damaged = []
        assert record.segment is not None, "a full record has a segment"
        self.segments = [record.segment, *table.segments]
        self.extras = None if table.extras is None else (table.extras[0], table.extras[1] + 1)
        self.whole, self.extras_whole, self.sealed = table.whole, table.extras_whole, list(table.seals)
        self.step, self.full, self.since = record.step, record.place.k, 0
        if self.whole and self.encoded.any():
            self.whole = ""

    def table(self, record: Record, layout: Layout, ids: Ids) -> Table:
        """Return the table of a full record that follows this state, and has partitions `ids` (ascending) itself."""
        rest = np.ones(len(self.ids), np.bool_)
        rest[self.find(ids)] = False
        at = np.flatnonzero(rest & self.saved)
        used = np.zeros(len(self.segments), np.bool_)
        used[self.segment[at]] = True
        extras, whole, extras_whole = self.extras, record.whole, self.extras_whole
        if record.extras:
            extras, extras_whole = (record.version, -1), record.whole
        elif extras is not None:
            used[extras[1]] = True
        if not record.sealed and not (record.changes and record.partitions):
            whole = self.whole
        number = np.cumsum(used) - 1
        if extras is not None and not record.extras:
            extras = extras[0], int(number[extras[1]])
        version = np.full(len(at), record.version) if record.sealed else self.version[at]
        return Table(
            self.ids[at],
            version,
            self.position[at],
            self.checksum[at],
            number[self.segment[at]],
            self.ids[rest & ~self.saved],
            self.ids[rest & self.doubt],
            tuple(segment for segment, need in zip(self.segments, used.tolist(), strict=True) if need),
            extras,
            extras_whole,
            whole,
            tuple(self.sealed[-KEEP_SEALED:]),
        )

    def lose(self, damage: Damage) -> None:
        """Note damage: any partition may have had a newer copy there."""
        self.damaged.append(damage)
        self.doubt[:] = True
        self.whole = ""

    def _save(self, record: Record, tail: Tail, what: object) -> None:
        """Take the copies of a delta."""
        assert self.layout is not None, "a delta follows a full record"
        assert record.segment is not None, "a delta has a segment"
        found = self.find(tail.ids)
        if (found < 0).any():
            raise corrupt(
                what, f"partition {self.layout.name(int(tail.ids[found < 0][0]))} is not of this lane"
            )
        at = adjacent(found)
        number = len(self.segments)
        self.segments.append(record.segment)
        self.version[at] = record.version if tail.versions is None else tail.versions
        self.segment[at] = number
        self.position[at] = positions(self.layout, tail.ids)
        self.checksum[at] = tail.checksums
        self.since += record.partitions
        if record.changes:  # others have only moved copies
            self.doubt[at] = False
            self.whole = "" if record.partitions else self.whole
        if record.extras:
            self.extras, self.extras_whole = (record.version, number), ""

    def _seal(self, record: Record, what: object) -> None:
        if (self.saved & self.encoded).any():
            raise corrupt(what, "it calls a state consistent that has encoded copies")
        if not self.saved.all() or (self.version != record.version).any():
            raise corrupt(what, "it calls a state consistent that has copies of other steps")
        if record.extras:
            self.extras_whole = record.whole
        self.whole = record.whole
        self.sealed.append(Seal(record.place, record.epoch, record.step, record.whole))
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
