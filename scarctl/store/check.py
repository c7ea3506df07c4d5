"""Check a whole store: every term, record, chain and segment and, on request, every byte of data."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, UsageError
from scarctl.state.layout import Layout
from scarctl.store.encoder import layout_of
from scarctl.store.foreign import SETTINGS_COPY, check_copy
from scarctl.store.format import (
    SETTINGS,
    corrupt,
    is_segment_name,
    layout_path,
    log_folder,
    record_path,
    segment_path,
    shard_folder,
    snapshot_path,
    term_path,
    topology_path,
)
from scarctl.store.gc import used_segments
from scarctl.store.hosts import host_marks, host_path
from scarctl.store.layouts import layout_digests
from scarctl.store.log import ShardLog
from scarctl.store.record import Record
from scarctl.store.segment import SegmentRef, by_group, partition_checksums, positions
from scarctl.store.segment_reader import SegmentReader, open_segment
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import read_snapshot, snapshot_names, snapshots
from scarctl.store.store import Store
from scarctl.store.subset import PIECE, Subset
from scarctl.store.term import Place, Term, shown
from scarctl.store.topology import read_topology, topology_epochs
from scarctl.store.usage import usage
from scarctl.util.arrays import Ids
from scarctl.util.document import Document
from scarctl.util.text import counted

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

_PAUSE = 0.05
"""Seconds between two readings of the newest and the kept states, beside a writer."""
_NAMED = 1000


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
        self.store = Store(store.address, store.blobs, store.id, store.settings)
        self.layouts: dict[str, Layout | None] = {}
        self.blobs = store.blobs
        self.read_data = read_data
        self.subset = subset
        self.progress = progress
        self.report = Report()
        self.total = 0
        self.pinned: dict[int, set[Place]] = {}
        """Records of each lane that snapshots keep."""

    def run(self) -> Report:
        self.total = usage(self.store)["bytes"]
        with self._noting(SETTINGS):
            self.store.again()
        self._count(SETTINGS)
        if self.blobs.has(SETTINGS_COPY):  # a store before its first opening has none
            with self._noting(SETTINGS_COPY):
                check_copy(self.blobs)
            self._count(SETTINGS_COPY)
        for digest in layout_digests(self.store.blobs):
            self._layout(digest)
            self._count(layout_path(digest))
        for name in snapshot_names(self.store):
            self._snapshot(name)
        for epoch in topology_epochs(self.store):
            with self._noting(topology_path(epoch)):
                read_topology(self.store, epoch)
            self._count(topology_path(epoch))
        for place in host_marks(self.store):  # hints, on which nothing depends
            self._count(host_path(place))
        for shard in self.store.shards():
            self._lane(self.store.log(shard))
        return self.report

    def _snapshot(self, name: str) -> None:
        path = snapshot_path(name)
        try:
            with self._noting(path):
                snapshot = read_snapshot(self.store, name)
                for shard, place in snapshot.places.items():
                    self.pinned.setdefault(shard, set()).add(place)
        except UsageError:
            return  # deleted meanwhile
        self._count(path)

    def _kept(self, log: ShardLog) -> set[Place]:
        """Return the records of kept states now: a writer or a user may have given some up since the check began."""
        # A snapshot that is damaged now may still keep its state.
        with contextlib.suppress(Corruption):
            self.pinned[log.shard] = {
                s.places[log.shard] for s in snapshots(self.store) if log.shard in s.places
            }
        found = set(self.pinned.get(log.shard, ()))
        with contextlib.suppress(Corruption):
            found |= {seal.place for seal in log.state(around=True).sealed}
        return found

    def _given_up(self, log: ShardLog, place: Place) -> bool:
        """Return whether a record is of an earlier term and not kept, so that a writer may have deleted it."""
        with contextlib.suppress(Corruption):
            top = log.newest_top(around=True)
            return top is not None and top.term.number > place.number and place not in self._kept(log)
        return False

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

    # --- lanes ----------------------------------------------------------------------------------------------

    def _lane(self, log: ShardLog) -> None:
        # Listed before the records, because a live run adds a segment first, then its record.
        there = dict(self.blobs.files(f"{shard_folder(log.shard)}/seg"))
        claimed = {term.number: term.id for term in self._terms(log)}
        named: dict[str, tuple[SegmentRef, str, str]] = {}
        for number, term in log.logs():
            if number not in claimed:
                self.note(term_path(log.shard, number), "the claim of this term is missing, and it has a log")
            elif claimed[number] != term:
                self.note(log_folder(log.shard, number, term), "the claim of this term is another one")
            for record in self._records(log, number, term):
                if record.segment is not None:
                    held = f"record {shown(record.seq)}, {counted(record.partitions, 'partition')}, step {record.step}"
                    named[record.segment.name] = record.segment, record.layout, held
        needed, errors = self._needed(log)
        named = {**needed, **named}
        for name, (ref, layout, held) in named.items():
            if name in there or name in needed:
                self._segment(log, ref, layout, held)
        for file, error in errors:
            self._note_error(file, error)
        for name, size in there.items():
            if name not in named and is_segment_name(name):
                self.report.orphans.append(self.blobs.where(segment_path(log.shard, name)))
                self._count(segment_path(log.shard, name), size)

    def _terms(self, log: ShardLog) -> list[Term]:
        found, numbers = [], log.terms()
        for number in numbers:
            with self._noting(term_path(log.shard, number)):
                found.append(log.term(number))
            self._count(term_path(log.shard, number))
        # A hostile file name may claim any number, so holes are found between existing ones.
        for low, high in itertools.pairwise([0, *numbers]):
            if high > low + 1:
                self.note(term_path(log.shard, low + 1), f"terms {low + 1} to {high - 1} are missing")
        return found

    def _needed(
        self, log: ShardLog
    ) -> tuple[dict[str, tuple[SegmentRef, str, str]], list[tuple[str, Corruption]]]:
        """Return the segments of the newest state and of kept ones, with layout, and what holds them; and errors."""
        found: dict[str, tuple[SegmentRef, str, str]] = {}
        errors: list[tuple[str, Corruption]] = []
        try:
            state = log.state(around=True)
        except Corruption as error:
            errors.append((shard_folder(log.shard), error))
        else:
            errors += [(damage.file, Corruption(damage.reason)) for damage in state.damaged]
            self._add(found, state, "the newest state")
        for place in sorted(self._kept(log)):
            try:
                log.at(place)
                self._add(found, log.state_at(place), f"the kept state of record {shown(place.seq)}")
            except (Corruption, FileNotFoundError) as error:
                if place in self._kept(log):
                    gone = Corruption("the record of a kept state is missing")
                    errors.append((place.path(log.shard), error if isinstance(error, Corruption) else gone))
        return found, errors

    @staticmethod
    def _add(found: dict[str, tuple[SegmentRef, str, str]], state: ShardState, held: str) -> None:
        if state.layout is not None:
            for ref in used_segments(state):
                found.setdefault(ref.name, (ref, state.layout.digest, held))

    def _records(self, log: ShardLog, number: int, term: str) -> list[Record]:
        """Check the records of one term. Return those that can be read."""
        files = log.files(number, term)
        found: dict[int, Record] = {}
        for k, size in files.items():
            place = Place(number, term, k)
            with self._noting(place.path(log.shard), lambda place=place: self._given_up(log, place)):  # type: ignore[misc]
                found[k] = log.at(place)
            self._count(place.path(log.shard), size)
            self.report.records += 1
        for k, record in found.items():
            before = found.get(k - 1)
            if before is not None and not record.ends and not before.ends and record.parent != before.digest:
                path = record.place.path(log.shard)
                self.note(
                    path, f"it does not follow record {shown(before.seq)}: the chain of digests is broken"
                )
        if number == max(log.terms(), default=0):
            for low, high in itertools.pairwise([0, *files]):
                if high > low + 1:
                    path = record_path(log.shard, number, term, low + 1)
                    self.note(
                        path, f"this record is missing, so that those from {number}-{high} on do not count"
                    )
                    break
        return [record for record in found.values() if not record.ends]

    def _note_error(self, file: str, error: Corruption) -> None:
        """Note an error once: reading the state finds what reading a record finds, too."""
        full = file if file.startswith(self.blobs.where("")) else self.blobs.where(file)
        reason = error.message.removeprefix(f"{full}: ")
        if all(full != problem.file and problem.file not in reason for problem in self.report.problems):
            self.report.problems.append(Problem(full, None, reason))

    # --- segments -------------------------------------------------------------------------------------------

    def _segment(self, log: ShardLog, ref: SegmentRef, digest: str, held: str) -> None:
        path = segment_path(log.shard, ref.name)
        layout = self._layout(digest)
        reasons: dict[str, None] = {}  # each once
        try:
            with open_segment(self.blobs, path, ref) as segment:
                segment.check_head()
                ids, sums = segment.lists()
                if layout is not None and len(ids) and not 0 <= ids[0] <= ids[-1] < layout.partitions:
                    raise corrupt(self.blobs.where(path), "its list of partitions does not fit the layout")
                if layout is not None:
                    stored = layout_of(layout, ref.encoding, self.blobs.where(path))
                    for bad in self._data(segment, ref.name, stored, ids, sums):
                        self._name(path, layout, bad, "data do not match their checksum")
        except FileNotFoundError:
            if not self._still_needed(log, ref.name):
                return
            reasons["the segment is missing"] = None
        except Corruption as error:
            reasons[error.message] = None
        self.report.segments += 1
        for reason in reasons:
            self.note(path, f"{reason} ({held})")
        self._count(path, ref.nbytes)

    def _still_needed(self, log: ShardLog, name: str) -> bool:
        """Return whether a segment that is missing is needed now: a writer may have collected it meanwhile."""
        before: list[object] | None = None
        while True:
            found: list[object] = []
            with contextlib.suppress(Corruption, FileNotFoundError):
                states = [log.state(around=True), *(log.state_at(place) for place in self._kept(log))]
                if not any(ref.name == name for one in states for ref in used_segments(one)):
                    return False
                found = [one.place for one in states]
            # What is read beside a writer may be of an earlier moment: it counts if it is read twice.
            if found == before:
                return True
            before = found
            time.sleep(_PAUSE)

    def _data(
        self, segment: SegmentReader, name: str, layout: Layout, ids: Ids, sums: NDArray[np.uint64]
    ) -> Iterator[Ids]:
        """Yield the partitions whose bytes do not match their checksums."""
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
