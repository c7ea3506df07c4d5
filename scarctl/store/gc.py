"""Keep a store small while its writer commits: move copies, then delete files (docs/FORMAT.md, section 9).

A turn is a bounded piece of work on one shard. It moves some copies out of mostly dead segments, writes an index, and
commits a record that moves the boundary. Only then it deletes the files that are not reachable from the boundary on.

Garbage stays garbage forever: new records only name new segments, and a rollback restores only kept states. So a file
may be deleted late, or twice, or by the next writer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from scarctl.errors import Corruption, ScarError, UsageError
from scarctl.state.encoding import stored_as
from scarctl.state.encodings import ENCODINGS
from scarctl.store.compact import Space, choose, live_bytes, parts, read_pieces
from scarctl.store.format import (
    corrupt,
    epoch_of_segment,
    index_path,
    is_segment_name,
    record_path,
    segment_path,
    seq_of_index,
    shard_folder,
    shard_of_segment,
)
from scarctl.store.index import INDEX_BYTES
from scarctl.store.ledger import ShardFiles
from scarctl.store.log import ShardLog
from scarctl.store.record import Record
from scarctl.store.segment import SegmentRef
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import SealedSet, sealed_sets, settle_snapshots, snapshots
from scarctl.store.store import Store
from scarctl.store.topology import complete_sets
from scarctl.store.writer import StoreWriter

_log = logging.getLogger(__name__)

RATIO = 2.0
"""Largest size of a shard's files, as a multiple of the bytes of its newest copies. Kept sealed states come on top."""
TIGHT = 1.5
"""The ratio to keep instead while few copies must be moved for it, because they die in a favourable order."""
EXTRA = 0.2
"""Bytes moved per byte committed above which the ratio is `RATIO` again."""
_STEP = 1 / 64  # fraction of the newest copies' bytes that a turn frees at least
TURN_BYTES = 64 << 20
"""Most bytes that a turn moves; also the memory that it uses."""
TURN_FILES = 2000
"""Most files that a turn deletes."""
_WORTH = 4  # bytes freed per byte of index that a turn writes, at least
_ATTEMPTS = 8
FLOOR = 128 << 10
"""Bytes per shard that are not worth collecting, such as records, indexes and headers."""


@dataclass
class _Shard:
    """A collector's knowledge of a shard's files, to avoid listing them."""

    files: ShardFiles
    """The writer's count of the files."""
    look_at: int
    """Total bytes at which the shard is examined again."""
    garbage: list[tuple[str, int]] = field(default_factory=list)
    """Unreachable files to delete, in this order, and their bytes."""
    moved: int = 0
    """Bytes of copies moved in this shard."""
    stuck: set[str] = field(default_factory=set)
    """Segments with damaged copies: they stay."""


@dataclass
class Work:
    """Counts of a collector's work."""

    turns: int = 0
    moved_bytes: int = 0
    deleted_files: int = 0
    deleted_bytes: int = 0


class Collector:
    """Collect and compact for one writer, in its thread. Several collectors of a writer share its ledger."""

    def __init__(
        self, writer: StoreWriter, *, ratio: float = RATIO, floor: int = FLOOR, turn_bytes: int = TURN_BYTES
    ) -> None:
        """Collect for `writer`. Raises UsageError for a ratio that cannot be reached."""
        if ratio < 1.1:
            raise UsageError(
                f"a store cannot be kept at {ratio} times its live bytes", hint="use 1.1 or more"
            )
        self.done = Work()
        self._writer = writer
        self._store = writer.store
        self._ratio = ratio
        self._floor = floor
        self._turn_bytes = turn_bytes
        self._shards: dict[int, _Shard] = {}
        self._pins: dict[tuple[int, int], frozenset[str]] = {}  # segments of a kept state
        self._aborted = False

    # -- turns ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do one bounded piece of work, if there is any. Return whether there may be more.

        Raises as `StoreWriter.commit` does. Nothing is lost then, and a later turn continues.
        """
        self._abort_dead()
        for shard in self._writer.states:
            known = self._known(shard)
            if known.garbage:
                self._delete(shard)
                return True
            if known.files.total > known.look_at and (self._work(shard) or known.garbage):
                return True
        return False

    def settle(self) -> None:
        """Run turns until nothing is left to do."""
        while self.turn():
            pass

    def collect(self, keep: Iterable[SealedSet] = ()) -> None:
        """Collect all garbage in all shards, whatever the ratio. Then compact shards that still exceed the ratio.

        keep: sealed sets to keep in addition to the usual ones.
        """
        keep = tuple(keep)
        self._abort_dead()
        for shard in self._writer.states:
            self._known(shard)
            self._give_up(shard, keep)
            while self._shards[shard].garbage:
                self._delete(shard)
            more = True
            while more:
                more = self._work(shard, keep)
                while self._shards[shard].garbage:
                    self._delete(shard)

    def space(self, shard: int, keep: Iterable[SealedSet] = ()) -> Space:
        """Return the bytes of a shard's files by their use."""
        state = self._writer.states[shard]
        known = self._known(shard)
        used = live_bytes(state)
        kept = self._kept_segments(shard, self._kept(shard, keep))
        by_name = {s.name: int(n) for s, n in zip(state.segments, used, strict=True)}
        extras = None if state.extras is None else state.segments[state.extras[1]].name
        pinned = dead = 0
        for name, size in self._segments(shard).items():
            if name in kept:
                pinned += size - by_name.get(name, 0)
            elif not by_name.get(name) and name != extras:
                dead += size
        return Space(known.files.total, int(used.sum()), pinned, dead)

    def _abort_dead(self) -> None:
        """Abort unfinished uploads of earlier writers, once. After a failure, the next writer does it."""
        if self._aborted:
            return
        self._aborted = True
        try:
            epochs = dict.fromkeys(self._writer.states, self._writer.epoch)
            for path, token in dead_uploads(self._store, epochs):
                self._store.blobs.abort(path, token)
        except ScarError as error:
            _log.warning("unfinished uploads of earlier writers could not be deleted: %s", error)

    # -- one shard -----------------------------------------------------------------------------------------------

    def _known(self, shard: int) -> _Shard:
        if shard not in self._shards:
            accounts = self._writer.ledger.shards
            if shard not in accounts:
                folders = (f"{shard_folder(shard)}/{name}" for name in ("seg", "log", "index"))
                total = sum(size for folder in folders for _, size in self._store.blobs.files(folder))
                accounts[shard] = ShardFiles(total)
            self._shards[shard] = _Shard(accounts[shard], self._floor)
        return self._shards[shard]

    def _segments(self, shard: int) -> dict[str, int]:
        return {n: s for n, s in self._store.blobs.files(f"{shard_folder(shard)}/seg") if is_segment_name(n)}

    def _work(self, shard: int, keep: tuple[SealedSet, ...] = ()) -> bool:
        """Make a shard smaller, if it is too large. Return whether it became smaller."""
        writer, known = self._writer, self._shards[shard]
        state = writer.states[shard]
        if not writer.is_settled(shard) or state.doubt.any() or not len(state.ids):
            known.look_at = known.files.total + self._floor
            return False
        space = self.space(shard, keep)
        start = int(self._ratio_now(known, space) * space.live) + space.pinned
        start += max(self._floor - space.live // 32, 0)
        if space.total <= start:
            known.look_at = min(start, space.total + space.live // 16 + self._floor // 4)
            return False
        gap = max(int(_STEP * space.live), _WORTH * 2 * INDEX_BYTES * len(state.ids))
        over = space.total - space.dead - (start - gap)
        moved = self._compact(shard, over, keep) if over > 0 else 0
        self._give_up(shard, keep)
        self.done.turns += 1
        # Indexes and records do not count, because a turn creates about as many as it deletes.
        freed = sum(size for path, size in known.garbage if "/seg/" in path)
        if moved or freed >= gap // 2:
            known.look_at = min(known.look_at, start)
            return True
        # All else has to be kept, so the next attempt waits until the shard has grown.
        known.look_at = known.files.total - freed + max(space.live // 8, self._floor, gap)
        return False

    def _ratio_now(self, known: _Shard, space: Space) -> float:
        """Return the ratio to keep. The fewer copies were moved so far, the smaller it is."""
        spare = EXTRA * known.files.handed - known.moved
        share = min(max(spare / max(space.live, 1), 0.0), 1.0)
        return self._ratio - max(self._ratio - TIGHT, 0.0) * share

    def _compact(self, shard: int, free: int, keep: tuple[SealedSet, ...]) -> int:
        """Move copies until segments with `free` dead bytes are empty, up to a turn's limit. Return the bytes moved."""
        writer, known = self._writer, self._shards[shard]
        state = writer.states[shard]
        stays = self._kept_segments(shard, self._kept(shard, keep)) | known.stuck
        at = choose(state, known.files.lives, stays, free=free, limit=self._turn_bytes)
        moved = 0
        for ids in parts(state, known.files.lives, at):
            encoding = ENCODINGS[int(state.encoding(state.find(ids[:1]))[0])]
            stored = stored_as(writer.layout, encoding)
            whole, pieces, reasons = read_pieces(self._store, state, stored, ids)
            for reason in reasons:
                _log.warning("a damaged copy is not moved: %s", reason)
            if reasons:
                damaged = np.setdiff1d(ids, whole)
                known.stuck |= {state.segments[n].name for n in state.segment[state.find(damaged)].tolist()}
            if len(whole):
                moved += writer.compact(shard, whole, pieces, encoding).nbytes
        self.done.moved_bytes += moved
        known.moved += moved
        return moved

    def _give_up(self, shard: int, keep: tuple[SealedSet, ...]) -> None:
        """Move the boundary to the newest record, and list the files that can be deleted."""
        writer, known = self._writer, self._shards[shard]
        state = writer.states[shard]
        if not writer.is_settled(shard) or state.doubt.any() or state.seq < 0:
            return
        kept = self._kept(shard, keep)
        for seq in kept:
            self._pin(shard, seq)
        boundary = writer.advance_boundary(shard, frozenset(kept))
        # Listed again, once the boundary is visible to all: a snapshot made before that is kept as well.
        kept |= self._kept(shard, keep)
        for seq in kept:
            self._pin(shard, seq)
        settle_snapshots(self._store)
        known.garbage = self._garbage(shard, boundary, kept)

    def _kept(self, shard: int, keep: Iterable[SealedSet]) -> set[int]:
        """Return the records of kept states: snapshots, the newest complete sealed set, and a newer seal."""
        states = self._writer.states
        found = {s.seqs[shard] for s in snapshots(self._store) if shard in s.seqs}
        found |= {sealed.seqs[shard] for sealed in keep if shard in sealed.seqs}
        own = states[shard].sealed
        if self._store.part is None:
            complete = next(iter(sealed_sets(states.values())), None)
        else:
            complete = self._complete_of_ranks(states[shard]) if len(own) > 1 else None
        if complete is not None and shard in complete.seqs:
            found.add(complete.seqs[shard])
        # The newest seal of this shard is kept, because it becomes complete once the other shards follow.
        if own:
            found.add(own[-1].seq)
        return {seq for seq in found if seq <= states[shard].seq}

    def _complete_of_ranks(self, own: ShardState) -> SealedSet | None:
        """Return the newest state that all ranks of its topology have sealed. Reads the logs of other ranks again."""
        found = complete_sets(self._store.again(), {own.shard: own}, of=own.shard)
        return next((sealed for sealed in found if own.shard in sealed.seqs), None)

    def _pin(self, shard: int, seq: int) -> frozenset[str]:
        """Return the segments of a kept state, after writing its index, which replaces the records before it."""
        if (shard, seq) not in self._pins:
            newest = self._writer.states[shard]
            log = self._store.log(shard)
            if seq == newest.seq:
                return frozenset(s.name for s in _used(newest))
            try:
                state = self._store.state(shard, at=seq)
                if not log.has_index(seq):
                    self._writer.put_index(state)
            except FileNotFoundError:
                raise Corruption(f"record {seq} of shard {shard} is missing: nothing is collected") from None
            self._pins[shard, seq] = frozenset(s.name for s in _used(state))
        return self._pins[shard, seq]

    def _kept_segments(self, shard: int, kept: Iterable[int]) -> frozenset[str]:
        return frozenset(name for seq in kept for name in self._pin(shard, seq))

    def _garbage(self, shard: int, boundary: int, kept: set[int]) -> list[tuple[str, int]]:
        """Return the files that are not reachable from the boundary on: segments, then indexes, then records.

        In this order, because records and indexes that remain after a crash name the other files. Records are in
        ascending order, because a fenced writer notices the deletion of the oldest (see `Publisher._is_newest`).
        """
        writer = self._writer
        log = self._store.log(shard)
        needed = set(self._kept_segments(shard, kept)) | {s.name for s in _used(writer.states[shard])}
        needed |= {
            record.segment.name for record in _from(log, boundary, writer.states[shard].seq) if record.segment
        }
        # Segments of later epochs belong to a writer that has taken over, and that has to collect them.
        segments = [
            (segment_path(shard, name), size)
            for name, size in self._segments(shard).items()
            if name not in needed and epoch_of_segment(name) <= writer.epoch
        ]
        past = range(boundary)
        indexes = [
            (index_path(shard, seq), size)
            for name, size in self._store.blobs.files(f"{shard_folder(shard)}/index")
            if (seq := seq_of_index(name)) is not None and seq in past and seq not in kept
        ]
        records = [
            (record_path(shard, seq), size)
            for seq, size in sorted(log.files().items())
            if seq in past and seq not in kept
        ]
        return segments + indexes + records

    def _delete(self, shard: int) -> None:
        known = self._shards[shard]
        for path, size in known.garbage[:TURN_FILES]:
            try:
                self._store.blobs.delete(path)
            except FileNotFoundError:
                continue
            finally:
                known.files.total -= size
            self.done.deleted_files += 1
            self.done.deleted_bytes += size
            if "/log/" in path:
                self._writer.states[shard].records -= 1
        known.garbage = known.garbage[TURN_FILES:]


def orphans(store: Store, shard: int) -> list[tuple[str, int]]:
    """Return the segments, with their bytes, that no record will ever name, because their writers are fenced.

    Safe next to a live writer: a segment of the newest epoch may be an unfinished upload, and is not returned. Raises
    Corruption if damage hides which segments are needed.
    """
    log = store.log(shard)
    files = store.blobs.files(
        f"{shard_folder(shard)}/seg"
    )  # listed first: later segments may be named by records that are not read here
    for attempt in range(_ATTEMPTS):
        newest = log.numbers()[-1:]
        try:
            needed, epoch = _reachable(store, log)
        except FileNotFoundError as error:
            if attempt == _ATTEMPTS - 1:
                raise corrupt(error.filename, "it is missing, so orphans cannot be recognized") from None
            continue  # the writer has moved the boundary meanwhile
        except Corruption:
            if attempt == _ATTEMPTS - 1 or newest == log.numbers()[-1:]:
                raise
            continue
        settle_snapshots(store)
        return [
            (name, size)
            for name, size in files
            if is_segment_name(name) and name not in needed and epoch_of_segment(name) < epoch
        ]
    raise AssertionError("unreachable")


def dead_uploads(store: Store, epochs: Mapping[int, int]) -> list[tuple[str, str]]:
    """Return the unfinished uploads of fenced writers, whose epochs are below `epochs[shard]`, as (path, token)."""
    found = []
    for path, token in store.blobs.uploads():
        of = shard_of_segment(path)
        if of is not None and of[1] < epochs.get(of[0], 0):
            found.append((path, token))
    return found


def _reachable(store: Store, log: ShardLog) -> tuple[set[str], int]:
    """Return the segments that any record, index or kept state names; and the newest epoch of the log."""
    numbers = log.numbers()
    if not numbers:
        return set(), 0
    newest = log.record(numbers[-1])
    records = [log.record(seq) for seq in range(newest.boundary, newest.seq + 1)]
    for seq in numbers:
        if seq < newest.boundary:
            with contextlib.suppress(FileNotFoundError):
                records.append(log.record(seq))
    needed = {record.segment.name for record in records if record.segment is not None}
    state = store.state(log.shard)
    if state.doubt.any():
        raise Corruption(f"shard {log.shard} has a damaged segment: orphans cannot be recognized")
    states = [state]
    if newest.boundary:
        states.append(store.state(log.shard, at=newest.boundary))  # the boundary's index
    for seq in {s.seqs[log.shard] for s in snapshots(store) if log.shard in s.seqs}:
        states.append(store.state(log.shard, at=seq))
    there = set(log.numbers())
    states += [store.state(log.shard, at=seq) for seq in (seal.seq for seal in state.sealed) if seq in there]
    return needed | {segment.name for found in states for segment in found.segments}, newest.epoch


def _used(state: ShardState) -> list[SegmentRef]:
    """Return the segments that a state needs."""
    used = np.zeros(len(state.segments) + 1, bool)
    used[state.segment] = True
    if state.extras is not None:
        used[state.extras[1]] = True
    return [s for s, need in zip(state.segments, used[:-1].tolist(), strict=True) if need]


def _from(log: ShardLog, boundary: int, newest: int) -> Iterator[Record]:
    """Yield all records from the boundary to the newest."""
    for seq in range(boundary, newest + 1):
        try:
            yield log.record(seq)
        except FileNotFoundError:
            raise Corruption(f"record {seq} of shard {log.shard} is missing: nothing is collected") from None
