"""Keep a lane small while its writer commits: move copies, then delete files (docs/FORMAT.md, section 9).

A turn is a bounded piece of work. It moves some copies out of mostly dead segments, and commits a full record, so that
the segments of earlier records are not needed. Then it looks whether the term is still the writer's, and deletes.

Records of the writer's own term are never deleted, so that none of their numbers is used again. If they have become
many, the writer begins another term first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from scarctl.errors import Corruption, ScarError, UsageError
from scarctl.state.encoding import stored_as
from scarctl.state.encodings import ENCODINGS
from scarctl.store.compact import Space, choose, live_bytes, parts, read_pieces
from scarctl.store.format import (
    is_segment_name,
    log_folder,
    record_path,
    segment_path,
    shard_folder,
    shard_of_segment,
    term_of_segment,
)
from scarctl.store.log import ShardLog
from scarctl.store.segment import SegmentRef
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import SealedSet, settle_snapshots, snapshots
from scarctl.store.store import Store
from scarctl.store.table import TABLE_BYTES
from scarctl.store.term import Place
from scarctl.store.topology import complete_sets
from scarctl.store.writer import StoreWriter

_log = logging.getLogger(__name__)

RATIO = 2.0
"""Largest size of a lane's files, as a multiple of the bytes of its newest copies. Kept states come on top."""
TIGHT = 1.5
"""The ratio to keep instead while few copies must be moved for it, because they die in a favourable order."""
EXTRA = 0.2
"""Bytes moved per byte committed above which the ratio is `RATIO` again."""
_STEP = 1 / 64  # fraction of the newest copies' bytes that a turn frees at least
TURN_BYTES = 64 << 20
"""Most bytes that a turn moves; also the memory that it uses."""
TURN_FILES = 2000
"""Most files that a turn deletes."""
_WORTH = 4  # bytes freed per byte of a table that a turn writes, at least
FLOOR = 128 << 10
"""Bytes that are not worth collecting, such as records and headers."""
RECORDS = 1000
"""Records of a term above which its writer begins another one, when it collects."""
_RECENT = 16
"""Terms whose records are counted when a collector begins: those before have been collected."""


@dataclass
class Work:
    """Counts of a collector's work."""

    turns: int = 0
    moved_bytes: int = 0
    deleted_files: int = 0
    deleted_bytes: int = 0


class Collector:
    """Collect and compact for one writer, in its thread."""

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
        self._shard = writer.shard
        self._ratio = ratio
        self._floor = floor
        self._turn_bytes = turn_bytes
        self._look_at = floor
        """Bytes of all files at which the lane is examined again."""
        self._garbage: list[tuple[str, int]] = []
        """Files to delete, in this order, and their bytes."""
        self._stuck: set[str] = set()
        """Segments with damaged copies: they stay."""
        self._pins: dict[Place, frozenset[str]] = {}
        """Segments of a kept state."""
        self._ledger = writer.ledger
        self._handed = writer.ledger.handed_bytes
        """Bytes of the commits before."""
        self._others: int | None = None
        """Bytes of the lane's files, without what the writer has written; None before they are counted."""
        self._shorter = False
        """Whether the newest full record names states that are not kept any longer."""
        self._aborted = False

    # -- turns ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do one bounded piece of work, if there is any. Return whether there may be more.

        Raises as `StoreWriter.commit` does. Nothing is lost then, and a later turn continues.
        """
        self._abort_dead()
        if self._garbage:
            self._delete()
            return True
        return self._total() > self._look_at and (self._work() or bool(self._garbage))

    def settle(self) -> None:
        """Run turns until nothing is left to do."""
        while self.turn():
            pass

    def collect(self, keep: Iterable[SealedSet] = ()) -> None:
        """Collect all garbage, whatever the ratio. Then compact if the lane still exceeds the ratio.

        keep: consistent states to keep in addition to the usual ones.
        """
        kept = tuple(keep)
        self._abort_dead()
        self._give_up(kept, thorough=True)
        while self._garbage:
            self._delete()
        more = True
        while more:
            more = self._work(kept)
            while self._garbage:
                self._delete()

    def space(self, keep: Iterable[SealedSet] = ()) -> Space:
        """Return the bytes of the lane's files by their use."""
        state = self._writer.state
        used = live_bytes(state)
        kept = self._kept_segments(self._kept(keep))
        by_name = {s.name: int(n) for s, n in zip(state.segments, used, strict=True)}
        extras = None if state.extras is None else state.segments[state.extras[1]].name
        pinned = dead = 0
        for name, size in self._segments().items():
            if name in kept:
                pinned += size - by_name.get(name, 0)
            elif not by_name.get(name) and name != extras:
                dead += size
        return Space(self._total(), int(used.sum()), pinned, dead)

    def _abort_dead(self) -> None:
        """Abort unfinished uploads of earlier writers, once. After a failure, the next writer does it."""
        if self._aborted:
            return
        self._aborted = True
        try:
            for path, token in dead_uploads(self._store, {self._shard: self._writer.term.number}):
                self._store.blobs.abort(path, token)
        except ScarError as error:
            _log.warning("unfinished uploads of earlier writers could not be deleted: %s", error)

    # -- space ---------------------------------------------------------------------------------------------------

    def _total(self) -> int:
        """Return the bytes of the lane's files, which are counted once."""
        if self._others is None:
            log = self._store.log(self._shard)
            folders = [log_folder(self._shard, *term) for term in log.logs()[-_RECENT:]]
            folders.append(f"{shard_folder(self._shard)}/seg")
            there = sum(size for folder in folders for _, size in self._store.blobs.files(folder))
            self._others = there - self._ledger.written_bytes
        return self._others + self._ledger.written_bytes

    def _segments(self) -> dict[str, int]:
        folder = f"{shard_folder(self._shard)}/seg"
        return {name: size for name, size in self._store.blobs.files(folder) if is_segment_name(name)}

    def _work(self, keep: tuple[SealedSet, ...] = ()) -> bool:
        """Make the lane smaller, if it is too large. Return whether it became smaller."""
        writer, total = self._writer, self._total()
        state = writer.state
        if not writer.is_settled() or state.doubt.any() or not len(state.ids):
            self._look_at = total + self._floor
            return False
        self._let_go(keep)
        space = self.space(keep)
        start = int(self._ratio_now(space) * space.live) + space.pinned
        start += max(self._floor - space.live // 32, 0)
        if space.total <= start:
            self._look_at = min(start, space.total + space.live // 16 + self._floor // 4)
            return False
        gap = max(int(_STEP * space.live), _WORTH * TABLE_BYTES * len(state.ids))
        over = space.total - space.dead - (start - gap)
        moved = self._compact(over, keep) if over > 0 else 0
        self._give_up(keep)
        self.done.turns += 1
        # Records do not count, because a turn creates some, too.
        freed = sum(size for path, size in self._garbage if "/seg/" in path)
        if moved or freed >= gap // 2:
            self._look_at = min(self._look_at, start)
            return True
        # All else has to be kept, so the next attempt waits until the lane has grown.
        self._look_at = self._total() - freed + max(space.live // 8, self._floor, gap)
        return False

    def _ratio_now(self, space: Space) -> float:
        """Return the ratio to keep. The fewer copies were moved so far, the smaller it is."""
        spare = EXTRA * (self._ledger.handed_bytes - self._handed) - self.done.moved_bytes
        share = min(max(spare / max(space.live, 1), 0.0), 1.0)
        return self._ratio - max(self._ratio - TIGHT, 0.0) * share

    def _compact(self, free: int, keep: tuple[SealedSet, ...]) -> int:
        """Move copies until segments with `free` dead bytes are empty, up to a turn's limit. Return the bytes moved."""
        writer, lives = self._writer, self._ledger.lives
        state = writer.state
        stays = self._kept_segments(self._kept(keep)) | self._stuck
        at = choose(state, lives, stays, free=free, limit=self._turn_bytes)
        moved = 0
        for ids in parts(state, lives, at):
            encoding = ENCODINGS[int(state.encoding(state.find(ids[:1]))[0])]
            stored = stored_as(writer.layout, encoding)
            whole, pieces, reasons = read_pieces(self._store, state, stored, ids)
            for reason in reasons:
                _log.warning("a damaged copy is not moved: %s", reason)
            if reasons:
                damaged = np.setdiff1d(ids, whole)
                self._stuck |= {state.segments[n].name for n in state.segment[state.find(damaged)].tolist()}
            if len(whole):
                moved += writer.compact(whole, pieces, encoding).nbytes
        self.done.moved_bytes += moved
        return moved

    # -- what is not needed --------------------------------------------------------------------------------------

    def _give_up(self, keep: tuple[SealedSet, ...], *, thorough: bool = False) -> None:
        """Commit the table, list the files that are not needed from then on, and look: they may be deleted."""
        writer = self._writer
        if not writer.is_settled() or writer.state.doubt.any() or writer.state.place is None:
            return
        self._let_go(keep)
        if writer.state.records > RECORDS:
            writer.renew()
        elif writer.state.records > writer.state.full or self._shorter:
            writer.repeat()
        self._shorter = False
        # A snapshot that is created from now on finds this full record, and knows that it is late.
        kept = self._kept(keep)
        settle_snapshots(self._store)
        garbage = self._unneeded(kept) + self._records(kept, thorough=thorough)
        writer.check()
        self._garbage = garbage

    def _let_go(self, keep: tuple[SealedSet, ...]) -> None:
        """Let the next full record not name consistent states that are older than the newest one of all ranks."""
        state = self._writer.state
        if len(state.sealed) < 2:
            return
        complete: int | None = state.sealed[-1].seq
        if self._store.part is not None and len(state.ids):
            found = complete_sets(self._store.again(), {self._shard: state}, of=self._shard)
            complete = next((one.seqs[self._shard] for one in found if self._shard in one.seqs), None)
        if complete is None:
            return
        also = {sealed.seqs.get(self._shard) for sealed in keep}
        stay = [seal for seal in state.sealed if seal.seq >= complete or seal.seq in also]
        self._shorter = self._shorter or len(stay) < len(state.sealed)
        state.sealed = stay

    def _kept(self, keep: Iterable[SealedSet]) -> set[Place]:
        """Return the records of kept states: snapshots, and the newest consistent states."""
        log = self._store.log(self._shard)
        found = {s.places[self._shard] for s in snapshots(self._store) if self._shard in s.places}
        found |= {log.place(sealed.seqs[self._shard]) for sealed in keep if self._shard in sealed.seqs}
        return found | {seal.place for seal in self._writer.state.sealed}

    def _pin(self, place: Place) -> frozenset[str]:
        """Return the segments of a kept state; none if the record of a snapshot is gone: then it never counted."""
        if place not in self._pins:
            found = segments_of(self._store.log(self._shard), self._writer.state, [place])
            if not found:
                return found
            self._pins[place] = found
        return self._pins[place]

    def _kept_segments(self, kept: Iterable[Place]) -> frozenset[str]:
        return frozenset(name for place in kept for name in self._pin(place))

    def _unneeded(self, kept: set[Place]) -> list[tuple[str, int]]:
        """Return the segments, with their bytes, of this term and earlier ones that nothing needs."""
        needed = self._kept_segments(kept) | {s.name for s in self._writer.state.segments}
        return [
            (segment_path(self._shard, name), size)
            for name, size in self._segments().items()
            if name not in needed and term_of_segment(name) <= self._writer.term.number
        ]

    def _records(self, kept: set[Place], *, thorough: bool) -> list[tuple[str, int]]:
        """Return the records of earlier terms that nothing needs, oldest first, with their bytes.

        What closes a log stays. So a term whose log has nothing else was collected, with all before it. thorough: look
        at those, too.
        """
        log, found = self._store.log(self._shard), []
        for number, term in reversed(log.logs()):
            if number >= self._writer.term.number:
                continue
            there = log.files(number, term)
            end = next((k for k in reversed(there) if log.at(Place(number, term, k)).ends), None)
            gone = [k for k in there if k != end and Place(number, term, k) not in kept]
            found += [(record_path(self._shard, number, term, k), there[k]) for k in reversed(gone)]
            if not gone and not thorough:
                break
        return found[::-1]

    def _delete(self) -> None:
        self._total()  # counted before a file is gone
        assert self._others is not None, "they are counted"
        for path, size in self._garbage[:TURN_FILES]:
            try:
                self._store.blobs.delete(path)
            except FileNotFoundError:
                continue
            finally:
                self._others -= size
            self.done.deleted_files += 1
            self.done.deleted_bytes += size
        self._garbage = self._garbage[TURN_FILES:]


def orphans(store: Store, shard: int) -> list[tuple[str, int]]:
    """Return the segments, with their bytes, that no record will ever name, because their writers are fenced.

    Safe next to a live writer: a segment of the newest term may be an unfinished upload, and is not returned. Raises
    Corruption if damage hides which segments are needed.
    """
    before: Place | None = None
    while True:
        log = store.log(shard)
        # Listed first: later segments may be named by records that are not read here.
        files = store.blobs.files(f"{shard_folder(shard)}/seg")
        newest = max(log.terms(), default=0)
        state = store.state(shard)
        if state.doubt.any():
            raise Corruption(f"lane {shard} has a damaged segment: orphans cannot be recognized")
        try:
            named = _named(store, log, state)
        except Corruption:
            if state.place in (None, before):
                raise
            before = (
                state.place
            )  # its writer may have collected what was about to be read: then it has gone on
            continue
        return [
            (name, size)
            for name, size in files
            if is_segment_name(name) and name not in named and term_of_segment(name) < newest
        ]


def _named(store: Store, log: ShardLog, state: ShardState) -> set[str]:
    """Return the segments that a lane's records and its kept states name. Raises Corruption."""
    named = {record.segment.name for record in log.records() if record.segment is not None}
    kept = {s.places[log.shard] for s in snapshots(store) if log.shard in s.places}
    settle_snapshots(store)
    named |= {segment.name for segment in state.segments}
    return named | segments_of(log, state, kept | {seal.place for seal in state.sealed})


def dead_uploads(store: Store, terms: Mapping[int, int]) -> list[tuple[str, str]]:
    """Return the unfinished uploads of fenced writers, whose terms are below `terms[shard]`, as (path, token)."""
    found = []
    for path, token in store.blobs.uploads():
        of = shard_of_segment(path)
        if of is not None and of[1] < terms.get(of[0], 0):
            found.append((path, token))
    return found


def segments_of(log: ShardLog, newest: ShardState, places: Iterable[Place]) -> frozenset[str]:
    """Return the segments of the states after these records.

    A record that is gone never counted, unless it is a seal of the newest state. Raises Corruption.
    """
    needed = {seal.place for seal in newest.sealed}
    there = [place for place in places if place in needed or log.blobs.has(place.path(log.shard))]
    return frozenset(segment.name for place in there for segment in used_segments(log.state_at(place)))


def used_segments(state: ShardState) -> list[SegmentRef]:
    """Return the segments that a state needs: of its copies, its extras, and its own full record."""
    used = np.zeros(len(state.segments) + 1, bool)
    used[state.segment] = True
    used[0] = True
    if state.extras is not None:
        used[state.extras[1]] = True
    return [s for s, need in zip(state.segments, used[:-1].tolist(), strict=True) if need]
