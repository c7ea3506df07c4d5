"""Check a whole store: every record, chain, index and segment and, on request, every byte of data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from scarctl.errors import Corruption, UsageError
from scarctl.state.layout import Layout
from scarctl.store.encoder import layout_of
from scarctl.store.foreign import SETTINGS_COPY, check_copy
from scarctl.store.format import (
    SETTINGS,
    corrupt,
    index_path,
    is_segment_name,
    layout_path,
    record_path,
    segment_path,
    shard_folder,
    snapshot_path,
    topology_path,
)
from scarctl.store.hosts import host_marks, host_path
from scarctl.store.index import Index, parse_index, read_index
from scarctl.store.log import ShardLog
from scarctl.store.record import Record
from scarctl.store.segment import COLUMNS, SegmentRef, Tail, by_group, partition_checksums, positions
from scarctl.store.segment_reader import SegmentReader, open_segment, read_tail
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import read_snapshot, snapshot_names, snapshots
from scarctl.store.store import Store
from scarctl.store.subset import PIECE, Subset
from scarctl.store.topology import read_topology, topology_epochs
from scarctl.util.arrays import Ids
from scarctl.util.document import Document
from scarctl.util.text import counted

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

_NAMED = 1000
_ATTEMPTS = 8


@dataclass(frozen=True)
class Problem(Document):
    """Damage of a file, or of a partition or tensor in the file."""

    file: str
    partition: str | None
    reason: str


@dataclass
class Report:
    """The result of `verify`. `files`, `bytes`: counts of the files checked. `orphans`: segments that no record names.

    Orphans are harmless. At most 1,000 partitions are named per segment and reason; `damaged_partitions` counts all.
    """

    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    records: int = 0
    segments: int = 0
    orphans: list[str] = field(default_factory=list)
    damaged_partitions: int = 0
    data_bytes: int = 0
    """Bytes of partitions that were compared with their checksums."""

    @property
    def intact(self) -> bool:
        return not self.problems


def verify(
    store: Store, *, read_data: bool, subset: Subset | None = None, progress: Progress | None = None
) -> Report:
    """Check all files of the store, also those with older copies. The report lists all damage.

    read_data: also read all data and compare every partition's checksum.
    subset: read this part of the data only.

    Raises AccessDenied and Unavailable.
    """
    return _Check(store, read_data, subset, progress).run()


class _Check:
    def __init__(
        self, store: Store, read_data: bool, subset: Subset | None, progress: Progress | None
    ) -> None:
        # A new store object, because the caller's has cached files that may be damaged by now.
        self.store = Store(store.address, store.blobs, store.id, store.settings, one_log=store.one_log)
        self.layouts: dict[str, Layout | None] = {}
        self.blobs = store.blobs
        self.read_data = read_data
        self.subset = subset
        self.progress = progress
        self.report = Report()
        self.total = 0
        self.pinned: dict[int, set[int]] = {}
        """Records of each shard that snapshots keep."""

    def run(self) -> Report:
        self.total = self.store.usage({})["bytes"]
        with self._noting(SETTINGS):
            self.store.again()
        self._count(SETTINGS)
        if self.blobs.has(SETTINGS_COPY):  # stores of earlier versions have none
            with self._noting(SETTINGS_COPY):
                check_copy(self.blobs)
            self._count(SETTINGS_COPY)
        for digest in self.store.layouts():
            self._layout(digest)
            self._count(layout_path(digest))
        for name in snapshot_names(self.store):
            self._snapshot(name)
        ranked: set[int] | None = set()
        for epoch in topology_epochs(self.store):
            shards = None
            with self._noting(topology_path(epoch)):
                shards = read_topology(self.store, epoch).shards
            ranked = None if ranked is None or shards is None else ranked.union(shards)
            self._count(topology_path(epoch))
        for place in host_marks(self.store):  # hints, on which nothing depends
            self._count(host_path(place))
        for shard in self.store.shards():
            self._shard(self.store.log(shard))
        if ranked is not None:
            self._members([shard for shard in self.store.shards() if shard not in ranked])
        return self.report

    def _members(self, shards: list[int]) -> None:
        """Note partitions that two logs of one process have."""
        states: dict[int, ShardState] = {}
        for shard in shards if len(shards) > 1 or self.store.one_log else ():
            with contextlib.suppress(Corruption, FileNotFoundError):  # noted elsewhere
                states[shard] = self.store.log(shard).state(around=True)
        if self.store.one_log:
            for shard, state in states.items():
                if shard and len(state.ids):
                    has = f"it has {counted(len(state.ids), 'partition')} in log {shard}"
                    self.note(record_path(shard, state.seq), f"{has}, but this store has one log, number 0")
            return
        for digest in sorted({state.layout.digest for state in states.values() if state.layout is not None}):
            same = {
                n: one for n, one in states.items() if one.layout is not None and one.layout.digest == digest
            }
            ids = np.concatenate([state.ids for state in same.values()])
            logs = np.repeat(list(same), [len(state.ids) for state in same.values()])
            order = np.argsort(ids, kind="stable")
            ids, logs = ids[order], logs[order]
            twice = np.flatnonzero(ids[1:] == ids[:-1]) + 1
            for shard in np.unique(logs[twice]).tolist():
                mine = twice[logs[twice] == shard]
                name = self.store.layout(digest).name(int(ids[mine[0]]))
                also = f"log {logs[mine[0] - 1]} has {counted(len(mine), 'partition')} of log {shard}, too"
                self.note(record_path(shard, same[shard].seq), f"{also}, such as {name}")

    def _snapshot(self, name: str) -> None:
        path = snapshot_path(name)
        try:
            with self._noting(path):
                snapshot = read_snapshot(self.store, name)
                for shard, seq in snapshot.seqs.items():
                    self.pinned.setdefault(shard, set()).add(seq)
        except UsageError:
            return  # deleted meanwhile
        self._count(path)

    def _given_up(self, log: ShardLog, seq: int) -> bool:
        """Return whether record `seq` and its segment are obsolete, so that a writer may have deleted them."""
        if seq >= self._boundary(log):
            return False
        if seq not in self.pinned.get(log.shard, set()):
            return True
        # A snapshot kept it when this check began. A snapshot that is damaged now may still keep it.
        with contextlib.suppress(Corruption):
            self.pinned[log.shard] = {s.seqs[log.shard] for s in snapshots(self.store) if log.shard in s.seqs}
        return seq not in self.pinned[log.shard]

    def _boundary(self, log: ShardLog) -> int:
        """Return the current boundary, from the newest record that can be read."""
        newest = None
        with contextlib.suppress(Corruption):
            newest = log.newest_readable()
        return 0 if newest is None else newest.boundary

    def _layout(self, digest: str) -> Layout | None:
        """Return a layout. If it is missing or damaged, note that once, and return None."""
        if digest not in self.layouts:
            self.layouts[digest] = None
            with self._noting(layout_path(digest)):
                self.layouts[digest] = self.store.layout(digest)
        return self.layouts[digest]

    @contextlib.contextmanager
    def _noting(self, name: str, given_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Turn damage or absence of a file into a problem of the report, unless the file may be absent."""
        try:
            yield
        except Corruption as error:
            self.note(name, error.message)
        except FileNotFoundError:
            if not given_up():
                self.note(name, "this file is missing")

    def note(self, file: str, reason: str, partition: str | None = None) -> None:
        full = self.blobs.where(file)
        self.report.problems.append(Problem(full, partition, reason.removeprefix(f"{full}: ")))

    def _count(self, name: str, size: int | None = None) -> None:
        if size is None:
            size = self._size(name)
        self.report.files += 1
        self.report.bytes += size
        if self.progress is not None:
            self.progress(self.report.bytes, max(self.total, self.report.bytes))

    def _size(self, name: str) -> int:
        try:
            with self.blobs.reader(name) as file:
                return file.size
        except (FileNotFoundError, Corruption):
            return 0  # already noted

    # --- logs -----------------------------------------------------------------------------------------------

    def _shard(self, log: ShardLog) -> None:
        # Listed before the records, because a live run adds a record first, then its index.
        indexes = log.indexes()
        records = self._records(log, indexes)
        numbers = sorted(records)
        boundary = records[numbers[-1]].boundary if numbers else 0
        named = set()
        for record in records.values():
            if record.segment is not None:
                named.add(record.segment.name)
                self._segment(log, record.segment, record.layout, record.segment_kind, record)
        pinned = self.pinned.get(log.shard, set())
        for seq in indexes:
            index = self._index(log, seq, records)
            self._count(index_path(log.shard, seq))
            if index is None or seq > boundary:
                continue  # later records name their segments themselves
            for ref in index.state.segments:
                if ref.name not in named:
                    named.add(ref.name)
                    self._segment(log, ref, index.layout, None, seq)
        for seq in sorted({seq for seq in pinned | {boundary} if 0 < seq <= boundary} - set(indexes)):
            with contextlib.suppress(
                Corruption, FileNotFoundError
            ):  # faults of the record are noted elsewhere
                if log.has_index(seq):
                    continue
            if self._given_up(log, seq):
                continue
            self.note(index_path(log.shard, seq), "this index is missing, and the log before it is deleted")
        for seq in sorted(pinned - records.keys()):
            if self._given_up(log, seq):
                continue
            self.note(record_path(log.shard, seq), "this record is missing, and a snapshot names it")
        for name, size in self.blobs.files(f"{shard_folder(log.shard)}/seg"):
            if name not in named and is_segment_name(name):
                self.report.orphans.append(self.blobs.where(segment_path(log.shard, name)))
                self._count(segment_path(log.shard, name), size)

    def _records(self, log: ShardLog, indexes: list[int]) -> dict[int, Record]:
        files, found = self._newest(log)
        numbers = list(files)
        for seq, size in files.items():
            path = record_path(log.shard, seq)
            with self._noting(path, lambda seq=seq: self._given_up(log, seq)):  # type: ignore[misc]
                found[seq] = found[seq] if seq in found else log.record(seq)
            self._count(path, size)
            self.report.records += 1
        newest = max(found, default=-1)
        first = found[newest].boundary if found else 0
        present = set(numbers)
        # Gaps are found between existing numbers, because a hostile file name may claim any number.
        for low, high in zip(
            [first - 1, *(n for n in numbers if n >= first)], (n for n in numbers if n >= first), strict=False
        ):
            if high > low + 1:
                gap = f"{low + 1}" if high == low + 2 else f"{low + 1} to {high - 1}"
                self.note(record_path(log.shard, low + 1), f"record {gap} of shard {log.shard} is missing")
        beyond = [seq for seq in indexes if seq > max(present, default=-1)]
        for seq in beyond:
            self.note(record_path(log.shard, seq), "this record is missing: there is an index made after it")
        for seq, record in sorted(found.items()):
            if seq < first:
                continue  # read through its index only; the record before it may be of a fenced writer
            parent = found.get(seq - 1) if seq > first else None
            path = record_path(log.shard, seq)
            if parent is not None and record.parent != parent.digest:
                self.note(path, f"it does not follow record {seq - 1}: the chain of digests is broken")
            if parent is not None and record.epoch < parent.epoch:
                self.note(path, f"its epoch {record.epoch} is older than its parent's {parent.epoch}")
            if record.base is not None and record.base not in present and record.base >= first:
                self.note(path, f"record {record.base}, to which it rolls back, is missing")
        return found

    def _newest(self, log: ShardLog) -> tuple[dict[int, int], dict[int, Record]]:
        """Return the sizes of all records, and the newest record, read before it can be collected."""
        for _ in range(_ATTEMPTS):
            files = log.files()
            newest = max(files, default=-1)
            with contextlib.suppress(FileNotFoundError, Corruption):
                return files, {newest: log.record(newest)}
            if log.files().get(newest) is not None:
                break  # it is damaged
        return files, {}

    def _index(self, log: ShardLog, seq: int, records: dict[int, Record]) -> Index | None:
        path = index_path(log.shard, seq)
        what = self.blobs.where(path)
        with self._noting(path, lambda: self._given_up(log, seq)):
            known = [layout.partitions for layout in self.layouts.values() if layout is not None]
            raw = read_index(self.blobs, path, max(known, default=0))
            index = parse_index(raw, what, shard=log.shard, seq=seq)
            record = records.get(seq)
            if record is not None and index.state.tail_digest != record.digest:
                raise corrupt(what, "it is the index of another record")
            return index
        return None

    # --- segments -------------------------------------------------------------------------------------------

    def _segment(
        self, log: ShardLog, ref: SegmentRef, digest: str, kind: str | None, named_by: Record | int
    ) -> None:
        """Check a segment that a record or (by its number) an index names.

        kind: expected kind; None if only the segment itself has it.
        """
        path = segment_path(log.shard, ref.name)
        layout = self._layout(digest)
        reasons: dict[str, None] = {}  # each once
        missing = False
        tail = None
        try:
            with open_segment(self.blobs, path, ref) as segment:
                segment.check_head()
                kind = kind or segment.header.metadata.get("kind", "")
        except FileNotFoundError:
            missing = True
        except Corruption as error:
            reasons[error.message] = None
        if not missing and layout is not None and kind in COLUMNS:
            columns = len(COLUMNS[kind])
            count = (ref.nbytes - ref.tail) // (8 * columns)
            if isinstance(named_by, Record):
                count = named_by.partitions
            try:
                tail = read_tail(self.blobs, path, ref, kind, count, layout)
                if not reasons and tail.checksums is not None:
                    stored = layout_of(layout, ref.encoding, self.blobs.where(path))
                    with open_segment(self.blobs, path, ref) as segment:
                        for bad in self._data(segment, ref.name, stored, tail):
                            self._name(path, layout, bad, "data do not match their checksum")
            except FileNotFoundError:
                missing = True  # deleted since its header was read
            except Corruption as error:
                reasons[error.message] = None
        if missing:
            if self._given_up(log, named_by.seq if isinstance(named_by, Record) else named_by):
                return
            reasons["the segment is missing"] = None
        self.report.segments += 1
        if isinstance(named_by, Record):
            held = (
                f"record {named_by.seq}, {named_by.partitions} partitions of epoch {named_by.epoch}, "
                f"step {named_by.step}"
            )
        else:
            held = f"index {named_by}"
        for reason in reasons:
            self.note(path, f"{reason} ({held})")
        self._count(path, ref.nbytes)

    def _data(self, segment: SegmentReader, name: str, layout: Layout, tail: Tail) -> Iterator[Ids]:
        """Yield the partitions whose bytes do not match their checksums."""
        ids, sums = tail.ids, tail.checksums
        assert sums is not None
        place = positions(layout, ids)
        batch = self.blobs.batch if self.subset is None else PIECE
        for g, i, j in by_group(layout, ids):
            group = layout.groups[g]
            step = max(1, batch // max(1, min(group.rows_per_partition, group.rows) * group.row_bytes))
            for a in range(i, j, step) if self.read_data else ():
                b = min(a + step, j)
                if self.subset is not None and not self.subset.takes(name, a):
                    continue
                local = ids[a:b] - layout.base[g]
                wanted = [segment.want(group, t, local, place[a:b]) for t in range(len(group.tensors))]
                segment.fetch(wanted)
                self.report.data_bytes += sum(w.data.nbytes for w in wanted)
                intact = partition_checksums(group, b - a, [w.data for w in wanted]) == sums[a:b]
                if not intact.all():
                    yield ids[a:b][~intact]

    def _name(self, path: str, layout: Layout, bad: Ids, reason: str) -> None:
        self.report.damaged_partitions += len(bad)
        for i in bad[:_NAMED].tolist():
            self.note(path, reason, layout.name(i))
        if len(bad) > _NAMED:
            self.note(path, f"{reason}: {len(bad) - _NAMED} more partitions")
