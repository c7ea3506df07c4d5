"""Read a shard's log: its records in order, and the state that they describe (docs/FORMAT.md, section 7)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np

from scarctl.errors import Corruption, ScarError
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER
from scarctl.store.backends.base import Blobs, InDoubt
from scarctl.store.format import (
    MAX_RECORD,
    corrupt,
    index_path,
    record_path,
    segment_path,
    seq_of_index,
    seq_of_record,
    shard_folder,
)
from scarctl.store.index import Index, dump_index, parse_index, read_index
from scarctl.store.record import Record
from scarctl.store.segment import Tail, ascending, positions
from scarctl.store.segment_reader import read_tail
from scarctl.store.shard_state import Damage, ShardState
from scarctl.util.arrays import Ids

_log = logging.getLogger(__name__)

_ATTEMPTS = 8
"""Most attempts to read while a writer collects."""
_MOST_DAMAGED = 64
"""Most damaged or missing records that are read around."""


class ShardLog:
    """The log of one shard. `layouts` gives a layout by its digest."""

    def __init__(self, blobs: Blobs, shard: int, layouts: Callable[[str], Layout]) -> None:
        self.blobs = blobs
        self.shard = shard
        self._layouts = layouts

    def files(self) -> dict[int, int]:
        """Return the sizes of all records, by ascending sequence number; 0 if collected meanwhile."""
        numbers = self.numbers()
        sizes = dict(self.blobs.files(f"{shard_folder(self.shard)}/log"))
        return {seq: sizes.get(record_path(self.shard, seq).rpartition("/")[2], 0) for seq in numbers}

    def numbers(self) -> list[int]:
        """Return the sequence numbers of all records, ascending."""
        found = self._listed()
        if found and len(found) <= max(found) - min(found):
            # A listing during commits may lack a record but have the one after it. The next listing has both, unless
            # they were collected meanwhile.
            newest = max(found)
            found |= {seq for seq in self._listed() if seq < newest}
        return sorted(found)

    def _listed(self) -> set[int]:
        names = self.blobs.names(f"{shard_folder(self.shard)}/log")
        return {seq for name in names if (seq := seq_of_record(name)) is not None}

    def indexes(self) -> list[int]:
        names = self.blobs.names(f"{shard_folder(self.shard)}/index")
        return sorted(seq for name in names if (seq := seq_of_index(name)) is not None)

    def newest_index(self) -> int:
        """Return the number of the newest index, -1 for none."""
        return max(self.indexes(), default=-1)

    def record(self, seq: int) -> Record:
        """Return one record. Raises FileNotFoundError, or Corruption."""
        path = record_path(self.shard, seq)
        return Record.parse(
            self.blobs.read(path, MAX_RECORD), self.blobs.where(path), shard=self.shard, seq=seq
        )

    def newest(self) -> Record | None:
        """Return the newest record, None if the log is empty. Raises Corruption."""
        for _ in range(_ATTEMPTS):
            seq = max(self._listed(), default=-1)
            if seq < 0:
                return None
            with contextlib.suppress(FileNotFoundError):
                return self.record(seq)
            # The record was collected meanwhile, so a newer one exists.
        raise self._missing(seq)

    def newest_readable(self) -> Record | None:
        """Return the newest record that is not damaged, None without one. Raises Corruption (kind "newer-format")."""
        found = (self._there_or_why(seq) for seq in reversed(self.numbers()))
        return next((one for one in found if isinstance(one, Record)), None)

    def records(self) -> Iterator[Record]:
        """Yield all records from the boundary on, oldest first, and check their chain of digests. Raises Corruption.

        Records that are collected meanwhile are skipped.
        """
        newest = self.newest()
        if newest is None:
            return
        seq, parent = newest.boundary, None
        while seq <= newest.seq:
            try:
                record = self.record(seq)
            except FileNotFoundError:
                now = self.newest()
                if now is None or now.boundary <= seq:
                    raise self._missing(seq) from None
                seq, parent = now.boundary, None
                continue
            if parent is not None:
                self._check_parent(record, parent.digest)
            yield record
            seq, parent = seq + 1, record

    def state(self, at: int | None = None, *, around: bool = False) -> ShardState:
        """Return the state after record `at` (default: the newest). It is empty if the log is empty.

        around: read around damaged records. After one, as after a damaged segment, every member is in doubt.

        Raises Corruption, naming the file.
        """
        for attempt in range(_ATTEMPTS):
            numbers = self.numbers()
            newest = max(numbers, default=-1)
            try:
                found = self._state(numbers, at, around)
                if not found.damaged or attempt == _ATTEMPTS - 1:
                    return found
            except Corruption:
                if attempt == _ATTEMPTS - 1 or newest == max(self._listed(), default=-1):
                    raise
            else:
                if newest == max(self._listed(), default=-1):
                    return found
            # The writer has continued, and may have collected files that were about to be read.
        raise AssertionError("unreachable")

    def replay(self, most: int) -> Iterator[tuple[Record, Ids, ShardState]]:
        """Yield the newest records, oldest first: each with the ids of its partitions, and the state after it.

        The same state object changes with the next record. most: limit on records. A damaged segment yields no ids.
        Raises Corruption, also if the writer collects these records meanwhile.
        """
        state: ShardState | None = None
        for record in list(self.records())[-most:]:
            layout, tail, damage = self._content(record)
            if state is None or record.base is not None:
                state = self.state(record.seq)
            else:
                state.apply(
                    record, layout, tail, self.blobs.where(record_path(self.shard, record.seq)), damage
                )
            yield record, np.empty(0, np.int64) if tail is None else tail.ids, state

    def has_index(self, seq: int) -> bool:
        """Return whether a record has an intact index. Raises FileNotFoundError if there is no such record."""
        return self._index(self.record(seq)) is not None

    def put_index(self, state: ShardState) -> int:
        """Write the index of a state, the newest or a past one. Return its bytes, 0 if an intact index exists.

        Raises Corruption if parts of the state are in doubt, and the errors of writing.
        """
        path = index_path(self.shard, state.seq)
        if state.doubt.any():
            raise corrupt(self.blobs.where(path), "not written: a segment of this shard is damaged")
        for attempt in range(2):
            state.drop_unused_segments()
            content = dump_index(state)
            try:
                self.blobs.create_exclusive(path, content)
            except FileExistsError:
                try:
                    if self.has_index(state.seq):
                        return 0
                    if attempt:
                        raise
                    self.blobs.delete(path)  # a damaged index serves no reader
                except FileNotFoundError:
                    if attempt:
                        return 0  # a newer writer collects these files: the next commit will be fenced
                continue
            except InDoubt:
                # The index is visible, but perhaps not durable, and a later boundary must not rely on it.
                with contextlib.suppress(ScarError, OSError):
                    self.blobs.delete(path)
                raise
            return sum(memoryview(part).nbytes for part in content)
        raise AssertionError("unreachable")

    def _state(self, numbers: list[int], at: int | None, around: bool) -> ShardState:
        if at is not None:
            numbers = [n for n in numbers if n <= at]
        indexes = set(self.indexes())
        if at is not None and (not numbers or numbers[-1] != at):
            raise self._missing(at)
        if not numbers and indexes:
            raise self._missing(
                max(indexes)
            )  # all records are gone, and a new log must not begin in their place
        if not numbers:
            return ShardState(self.shard)
        # Walking back finds numbers that are missing or were deleted by rules.
        start, records = self._walk(numbers[-1], indexes, around)
        records.reverse()
        contents = self.blobs.each(self._content, [one for one in records if isinstance(one, Record)])
        for record in records:
            if isinstance(record, Damage):
                start.lose(record)
                continue
            layout, tail, damage = next(contents)
            start.apply(record, layout, tail, self.blobs.where(record_path(self.shard, record.seq)), damage)
        if around and at is None and max(indexes, default=-1) > numbers[-1]:
            start.lose(self._damage(max(indexes), self._missing(max(indexes))))
        start.records = len(numbers)
        start.past = at is not None
        return start

    def _walk(self, seq: int, indexes: set[int], around: bool) -> tuple[ShardState, list[Record | Damage]]:
        """Return the state to begin with, and the records to apply to it, newest first."""
        records: list[Record | Damage] = []
        child: Record | None = None
        boundary = lost = 0
        for record in self._chain(seq, indexes, around):
            if isinstance(record, Damage):
                lost += 1
                if record.error is not None and (record.seq <= boundary or lost > _MOST_DAMAGED):
                    raise record.error  # what it held is nowhere else, or the log before it was deleted
                records.append(record)
                child = None
                continue
            seq, boundary = record.seq, max(boundary, record.boundary)
            if child is not None and child.base is None:
                self._check_parent(child, record.digest)
            if seq in indexes and (index := self._index(record)) is not None:
                index.state.boundary, index.state.line = record.boundary, record.line
                return index.state, records
            records.append(record)
            if record.base is None and seq <= boundary:
                if seq == 0:
                    return ShardState(self.shard), records
                raise corrupt(
                    self.blobs.where(index_path(self.shard, seq)),
                    "this index is missing or damaged, and the log before it is deleted",
                )
            child = record
        raise AssertionError("unreachable")

    def _chain(self, seq: int, indexes: set[int], around: bool) -> Iterator[Record | Damage]:
        """Yield the records from `seq` back, without rolled-back ones. Records above an index are read in parallel."""
        read = self._there_or_why if around else self._there
        while seq >= 0:
            stop = max((index for index in indexes if index <= seq), default=0)
            for record in self.blobs.each(read, range(seq, stop - 1, -1)):
                yield record
                if record.base is not None:
                    break
            seq = record.seq - 1 if record.base is None else record.base

    def _there(self, seq: int) -> Record:
        try:
            return self.record(seq)
        except FileNotFoundError:
            raise self._missing(seq) from None

    def _there_or_why(self, seq: int) -> Record | Damage:
        """Return a record, or why it cannot be read. Raises Corruption if a later version of scarctl wrote it."""
        try:
            return self._there(seq)
        except Corruption as error:
            if error.kind != Corruption.kind:
                raise
            return self._damage(seq, error)

    def _damage(self, seq: int, error: Corruption) -> Damage:
        return Damage(seq, self.blobs.where(record_path(self.shard, seq)), error.message, True, error)

    def _index(self, record: Record) -> Index | None:
        """Return the index after a record, None if it cannot be used: the log has the same content.

        Raises Corruption if the record's layout is missing or damaged: then the log cannot be used either.
        """
        path = index_path(self.shard, record.seq)
        what = self.blobs.where(path)
        layout = self._layouts(record.layout)
        try:
            raw = read_index(self.blobs, path, layout.partitions)
            index = parse_index(raw, what, shard=self.shard, seq=record.seq)
            if index.state.tail_digest != record.digest or index.layout != record.layout:
                raise corrupt(what, "it is the index of another record")
            if len(index.state.ids) and index.state.ids[-1] >= layout.partitions:
                raise corrupt(what, "it has partitions that are not in the layout")
            index.state.layout = layout
            if index.state.whole and index.state.encoded.any():
                raise corrupt(what, "it calls encoded copies those of a whole state")
        except FileNotFoundError:
            return None
        except Corruption as error:
            _log.warning("a damaged index is ignored, and the log read instead: %s", error.message)
            return None
        if not index.names_whole:
            self._name_whole(index.state, record)
        return index

    def _name_whole(self, state: ShardState, record: Record) -> None:
        """Name the seal of all members of an earlier format's index, if the records since then keep it valid."""
        if not state.sealed:
            return
        newest = state.sealed[-1].seq
        try:
            while record.seq > newest and record.kind != "commit" and record.base is None:
                record = self.record(record.seq - 1)
        except (Corruption, FileNotFoundError):
            return
        if record.seq == newest and record.sealed:
            state.whole = record.identity
            own = None if record.segment is None else record.segment.name
            if state.extras is not None and state.segments[state.extras[1]].name == own:
                state.extras_whole = record.identity

    def _content(self, record: Record) -> tuple[Layout, Tail | None, Damage | None]:
        """Read a record's changes to the state."""
        layout = self._layouts(record.layout)
        if record.segment is None:
            return layout, None, None
        try:
            return layout, self.tail(record, layout), None
        except (Corruption, FileNotFoundError) as error:
            path = self.blobs.where(segment_path(self.shard, record.segment.name))
            reason = error.message if isinstance(error, Corruption) else f"{path}: the segment is missing"
            if record.kind == "epoch":
                raise corrupt(path, "the list of the shard's members is missing or damaged") from error
            return layout, None, Damage(record.seq, path, reason, record.sealed)

    def tail(self, record: Record, layout: Layout) -> Tail:
        """Return the tail of a record's segment. Raises Corruption or FileNotFoundError."""
        assert record.segment is not None
        path = segment_path(self.shard, record.segment.name)
        return read_tail(self.blobs, path, record.segment, record.segment_kind, record.partitions, layout)

    def older(self, ids: Ids, state: ShardState) -> ShardState | None:
        """Return, for `ids`, the copies next older than those in `state`; None if no partition has an older copy.

        The result has these ids only; version and segment are -1 without an older copy. It can be passed as `state`
        again. Damaged segments are skipped. Reads tails back to the oldest needed copy.
        """
        head = state.layout, state.seq, state.epoch, state.step, state.tail_digest, state.records
        found = ShardState(self.shard, *head, sealed=state.sealed)
        found.past = True  # an older copy must not be replaced by the copy that it stands in for
        if state.layout is None:
            return None
        found.set_members(ascending(ids))
        at = state.find(found.ids)
        current = np.where(at >= 0, state.segment[at], -1) if len(at) else at
        newer = {s.name: n for n, s in enumerate(state.segments)}
        wanted = current >= 0  # not found yet
        passed = np.zeros(len(found.ids), bool)  # the copy in `state` is newer than the record at hand
        # The older copy's version after a seal between the two copies.
        sealed_as = np.full(len(wanted), NEVER, np.int64)
        for record in self.back(state.seq):
            if not wanted.any() or record.layout != state.layout.digest:
                break
            if record.kind == "epoch":
                continue
            number: int | None = None
            tail: Tail | None = None
            if record.segment is not None:
                number = newer.get(record.segment.name)
                try:
                    tail = self.tail(record, state.layout)
                except (Corruption, FileNotFoundError):
                    # `verify` and the state's `damaged` name the segment; only intact copies count here. It may have
                    # held newer copies than those below it, so seals above it do not count for those.
                    sealed_as[passed] = NEVER
            if record.sealed and (tail is not None or record.segment is None):
                sealed_as[passed & (sealed_as < 0)] = record.version
            if tail is not None and record.segment is not None:
                here = np.flatnonzero(wanted & passed & np.isin(found.ids, tail.ids))
                if len(here):
                    assert tail.checksums is not None
                    inside = np.searchsorted(tail.ids, found.ids[here])
                    own = (
                        np.full(len(here), record.version) if tail.versions is None else tail.versions[inside]
                    )
                    found.version[here] = np.where(sealed_as[here] >= 0, sealed_as[here], own)
                    found.segment[here] = len(found.segments)
                    found.position[here] = positions(state.layout, tail.ids)[inside]
                    found.checksum[here] = tail.checksums[inside]
                    found.segments.append(record.segment)
                    wanted[here] = False
            if number is not None:
                passed |= current == number
        if wanted.any():
            self._older_sealed(found, state, at, np.flatnonzero(wanted))
        return found if found.segments else None

    def _older_sealed(self, found: ShardState, state: ShardState, at: Ids, wanted: Ids) -> None:
        """Find copies of found.ids[wanted] in kept sealed states, where the log has been collected."""
        for seq in (seal.seq for seal in reversed(state.sealed)):
            if not len(wanted):
                return
            try:
                kept = self.state(seq)
            except Corruption:
                continue  # collected too, or damaged
            there = kept.find(found.ids[wanted])
            own = at[wanted]
            older = (there >= 0) & (kept.version[there] >= 0) & (kept.version[there] < state.version[own])
            names = np.array([s.name for s in kept.segments] + [""])
            present = np.array([s.name for s in state.segments] + [""])
            older &= names[kept.segment[there]] != present[state.segment[own]]
            take, source = wanted[older], there[older]
            if len(take):
                offset = len(found.segments)
                found.segments.extend(kept.segments)
                found.version[take] = kept.version[source]
                found.segment[take] = kept.segment[source] + offset
                found.position[take] = kept.position[source]
                found.checksum[take] = kept.checksum[source]
            wanted = wanted[~older]

    def back(self, seq: int) -> Iterator[Record]:
        """Yield the records from `seq` back to the beginning of the log, without rolled-back ones."""
        child: Record | None = None
        while seq >= 0:
            try:
                record = self.record(seq)
            except (FileNotFoundError, Corruption):
                return
            if child is not None and child.base is None and child.parent != record.digest:
                return  # below the boundary, so it is of a fenced writer
            yield record
            child, seq = record, seq - 1 if record.base is None else record.base

    def _check_parent(self, record: Record, digest: str) -> None:
        if record.parent != digest:
            what = self.blobs.where(record_path(self.shard, record.seq))
            raise corrupt(what, f"it does not follow record {record.seq - 1}: the chain of digests is broken")

    def _missing(self, seq: int) -> Corruption:
        numbers = self.numbers()
        there = f"the log has {numbers[0]} to {numbers[-1]}" if numbers else "the log is empty"
        return corrupt(self.blobs.where(record_path(self.shard, seq)), f"this record is missing ({there})")
