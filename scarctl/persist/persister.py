"""Save hand-overs: commit copies from the arena to the store, then acknowledge them in the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.header import inode_in
from scarctl.arena.notes import stored_notes
from scarctl.arena.queue import HandOver, HandOverQueue
from scarctl.errors import Corruption, Fenced, Overwritten, ScarError
from scarctl.persist.space import SpaceFields
from scarctl.persist.speed import Meter
from scarctl.state.encoding import stored_as
from scarctl.state.extras import Notes
from scarctl.state.version import NEVER, pack, step_of
from scarctl.store import Collector, ShardState, StoreWriter
from scarctl.store.encoder import Encoder
from scarctl.store.segment import Source
from scarctl.util.arrays import Ids, distinct

log = logging.getLogger("scarctl")

_ATTEMPTS = 8
"""Attempts to write a segment while newer copies keep replacing its rows."""
_TIDY_PAUSE = 30.0  # seconds after a failure


class Interrupted(Exception):
    """A hand-over was not written completely, because of a pause, or because another process needs the store."""


class Persister:
    """Commits hand-overs. Use one thread at a time.

    A hand-over is one commit. In a store with a log for each shard it is one for each, all at once.
    """

    def __init__(self, arena: Arena, writer: StoreWriter) -> None:
        self.meter = Meter()
        """Measures the speed of commits."""
        self.interrupt = threading.Event()
        """Set by another thread to end the current write with `Interrupted`."""
        self._arena = arena
        self._inode = inode_in(arena.folder)
        self._writer = writer
        self._collector = Collector(writer)
        self._tidy_at = 0.0
        self._members = writer.members
        self._shard_of = np.full(arena.layout.partitions, -1, dtype=np.int32)
        for shard, ids in self._members.items():
            self._shard_of[ids] = shard
        self._sealed: tuple[tuple[int, str], set[int]] = (-1, ""), set()
        """Number and identity of one hand-over, and the shards that it has sealed already."""
        self._extras_of = -1, NEVER
        """Number and version of the hand-over whose extras were saved last."""
        self._notes = "", Notes()
        """The newest seal, and the notes that were saved with it."""

    def check(self, handover: HandOver) -> None:
        """Raise Corruption if the hand-over names partitions that the layout does not have.

        Raises Fenced if another arena, fetched from another host, has taken the place: the hand-over is of its copies.
        """
        if inode_in(self._arena.folder) != self._inode:
            raise Fenced(
                f"{self._arena.folder}: another arena has taken the place of the one that is saved",
                hint="the run has continued elsewhere",
            )
        if handover.ids.size and handover.ids[-1] >= self._arena.layout.partitions:
            raise Corruption(f"hand-over {handover.number} names partitions that do not exist")

    def persist(self, handover: HandOver) -> int:
        """Commit a hand-over and acknowledge it in the arena. Return the bytes of state written.

        Pending copies that are older than the hand-over are committed with it: it replaced theirs, or theirs was lost.
        After a failure call it again: durable copies are not written twice. Partitions that have a newer copy are left
        to the hand-over of that copy. Raises as `StoreWriter.commit` does, and Interrupted.
        """
        arena, version = self._arena, handover.version
        named = handover.number, handover.whole  # another process's queue may use the number again
        if self._sealed[0] != named:
            self._sealed = named, set()
        already = self._sealed[1]
        with self._reading(handover):
            waiting = arena.pending() & arena.intact() & (arena.version < version)
            own = handover.ids[arena.version[handover.ids] == version]
            waiting[own[arena.durable[own] != version]] = True
            if handover.sealed:
                waiting |= self._encoded() & arena.intact()
            ids = np.flatnonzero(waiting)
            shard_of = self._shard_of[ids]
            parts = [(shard, ids[shard_of == shard]) for shard in self._members if shard not in already]
            parts = [(shard, own) for shard, own in parts if own.size or handover.sealed]
            written = self._commit_all(parts, handover, already)
        self.commit_extras(handover)
        if handover.sealed and len(already) == len(self._members):
            arena.seal(version)
            if handover.extras is not None:
                self._notes = handover.whole, Notes.from_tree(handover.extras)
        return written

    def covers(self, handover: HandOver) -> bool:
        """Return whether all of the state up to a durable hand-over is durable: its extras, and every copy."""
        arena = self._arena
        left = arena.pending() & arena.intact() & (arena.version <= handover.version)
        return handover.extras is not None and not left.any()

    def commit_part(self, handover: HandOver, ids: Ids, extras: Any) -> int:
        """See `scarctl.persist.evacuation.Tier`: commit copies, none newer than the hand-over; seal nothing."""
        part = replace(handover, ids=ids, whole="", extras=extras, unsaved=None)
        shard_of = self._shard_of[ids]
        parts = [(shard, ids[shard_of == shard]) for shard in np.unique(shard_of).tolist()]
        committed: dict[int, tuple[Ids, bool]] = {}
        with self._reading(part):
            self._commit_each(parts, part, committed)
        return sum(int(self._arena.layout.partition_bytes[own].sum()) for own, _ in committed.values())

    def commit_extras(self, handover: HandOver) -> bool:
        """See `scarctl.persist.evacuation.Tier`: commit the extras alone, unless a commit of copies has saved them."""
        named = handover.number, handover.version
        if handover.extras is None or named == self._extras_of:
            return True
        step, (shard, state) = step_of(handover.version), next(iter(self._writer.states.items()))
        if step < state.step:
            return state.extras is not None and state.extras[0] > handover.version
        none = np.empty(0, dtype=np.int64)
        self._writer.commit(shard, none, self._source, step=step, extras=handover.extras)
        self._extras_of = named
        return True

    def notes(self, whole: str) -> Notes:
        """See `scarctl.persist.evacuation.Tier`. The store is not read if this has sealed the state."""
        name, notes = self._notes
        if name == whole:
            return notes
        return stored_notes(self._writer.store, list(self._writer.states.values()), whole)

    def _encoded(self) -> NDArray[np.bool_]:
        """Return which partitions' newest copies in the store are encoded: bool (partitions,)."""
        found = np.zeros(self._arena.layout.partitions, dtype=bool)
        for state in self._writer.states.values():
            found[state.ids] = state.encoded
        return found

    def stored(self) -> Ids:
        """Return the version that the store has of every partition, -1 for none: int64 (partitions,)."""
        found = np.full(self._arena.layout.partitions, NEVER, dtype=np.int64)
        for state in self._writer.states.values():
            found[state.ids] = state.version
        return found

    @contextmanager
    def _reading(self, handover: HandOver) -> Iterator[None]:
        """Note in the arena that copies are read inside. `_commit_all` may note the end earlier."""
        self._arena.read_begins(handover.version)
        try:
            yield
        finally:
            self._arena.read_ends(0)

    def tidy(self, limit: int) -> bool:
        """Collect old copies, moving about `limit` bytes. Return whether more may be left to do.

        Never raises, because saving does not depend on it. A failure is logged, and the work retried after a while.
        """
        if time.monotonic() < self._tidy_at:
            return False
        done = self._collector.done
        before = done.moved_bytes
        try:
            while not self.interrupt.is_set() and self._collector.turn():
                if done.moved_bytes - before >= limit:
                    return True
        except (ScarError, OSError, MemoryError) as error:
            log.warning("collecting old copies failed: %s", error)
            self._tidy_at = time.monotonic() + _TIDY_PAUSE
        return False

    @property
    def arena(self) -> Arena:
        """The arena whose copies are saved."""
        return self._arena

    @property
    def space(self) -> SpaceFields:
        """Bytes that saving and collecting have written, for display."""
        books, done = self._writer.ledger, self._collector.done
        return {
            "handed_bytes": books.handed_bytes,
            "written_bytes": books.written_bytes,
            "moved_bytes": done.moved_bytes,
            "collected_bytes": done.deleted_bytes,
            "write_amplification": round(books.written_bytes / books.handed_bytes, 4)
            if books.handed_bytes
            else None,
        }

    def _commit_all(self, parts: list[tuple[int, Ids]], handover: HandOver, already: set[int]) -> int:
        """Commit the ids of every shard of `parts`, all at once, and add newly sealed shards to `already`.

        Returns the bytes written.
        """
        sizes = stored_as(self._arena.layout, handover.encoding).partition_bytes
        unread = {shard for shard, _ in parts}
        committed: dict[int, tuple[Ids, bool]] = {}

        def read(shard: int) -> None:
            unread.discard(shard)
            if not unread:
                # The rest of the commits, which may take long, needs no copies: they may change.
                self._arena.read_ends(handover.number)

        try:
            self._commit_each(parts, handover, committed, read)
        finally:
            already.update(shard for shard, (_, sealed) in committed.items() if sealed)
        return sum(int(sizes[ids].sum()) for ids, _ in committed.values())

    def _commit_each(
        self,
        parts: list[tuple[int, Ids]],
        handover: HandOver,
        committed: dict[int, tuple[Ids, bool]],
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Commit the ids of every shard of `parts`, all at once, and add what `_commit` returns to `committed`.

        The first shard carries the extras. read: called with each shard once its copies are read. The error of one
        shard is raised when all shards have ended.
        """
        sizes = stored_as(self._arena.layout, handover.encoding).partition_bytes
        carrier = parts[0][0] if parts else None  # extras belong to the whole process: one shard has them

        def commit(part: tuple[int, Ids]) -> BaseException | None:
            shard, ids = part
            try:
                extras = handover.extras if shard == carrier else None
                committed[shard] = self._commit(shard, ids, handover, extras, partial(read, shard))
            except BaseException as error:  # raised once the other commits have ended
                return error
            return None

        with self.meter.commit(len(parts)):
            ended = list(
                self._writer.store.blobs.write_each(commit, parts, lambda part: int(sizes[part[1]].sum()))
            )
        if faults := [fault for fault in ended if fault is not None]:
            raise next((fault for fault in faults if not isinstance(fault, Exception)), faults[0])

    def _commit(
        self, shard: int, ids: Ids, handover: HandOver, extras: Any, read: Callable[[], object] = lambda: None
    ) -> tuple[Ids, bool]:
        """Commit and acknowledge the `ids` without a newer copy.

        read: called once the copies are read, before the commit is complete.

        Returns these ids, and whether the shard is sealed.
        """
        arena = self._arena
        for _ in range(_ATTEMPTS):
            # Read first: if a copy changes after this, the comparison at the end discards the commit.
            before = arena.generation[ids].copy()
            versions = arena.version[ids]
            # A copy that is newer, or in progress, has its own hand-over.
            good = (versions >= 0) & (versions <= handover.version) & ((before & np.uint64(1)) == 0)
            ids, before, versions = ids[good], before[good], versions[good]
            sealed = handover.sealed and self._is_of(handover, shard, ids)
            if not ids.size and not sealed:
                read()
                return ids, False
            # Extras, seals and parts (number 0) are of the hand-over's step, other commits as old as their newest copy.
            own = sealed or extras is not None or not handover.number
            newest = handover.version if own else int(versions.max())
            rows = partial(self._source_of, ids, before)
            source: Source | Encoder = rows
            if handover.encoding != "exact":
                source = Encoder(arena.layout, handover.encoding, rows, ids)
            try:
                self._writer.commit(
                    shard,
                    ids,
                    source,
                    step=step_of(newest),
                    steps=step_of(versions),
                    sealed=sealed,
                    whole=handover.whole if sealed else "",
                    extras=extras,
                    verify_source=partial(self._unchanged, ids, before, read),
                )
            except Overwritten:
                continue
            if extras is not None:
                self._extras_of = handover.number, handover.version
            arena.encoding_error[ids] = source.errors if isinstance(source, Encoder) else -1.0
            arena.acknowledge(ids, versions, before)
            return ids, sealed
        raise Overwritten(
            f"shard {shard}: copies keep changing while they are written", hint="saving retries"
        )

    def _source(self, g: int, t: int, start: int, stop: int) -> memoryview:
        if self.interrupt.is_set():
            raise Interrupted
        self._arena.read_on()
        return self._arena.source(g, t, start, stop)

    def _source_of(
        self, ids: Ids, before: NDArray[np.uint64], g: int, t: int, start: int, stop: int
    ) -> memoryview:
        """Return rows of the arena. Raises Overwritten if a copy in them has changed, to stop writing early."""
        base, rows = int(self._arena.layout.base[g]), self._arena.layout.groups[g].rows_per_partition
        first, last = np.searchsorted(ids, (base + start // rows, base + -(-stop // rows)))
        if (self._arena.generation[ids[first:last]] != before[first:last]).any():
            raise Overwritten("copies have changed while they were written", hint="saving retries")
        return self._source(g, t, start, stop)

    def _unchanged(self, ids: Ids, before: NDArray[np.uint64], read: Callable[[], object]) -> bool:
        unchanged = bool((self._arena.generation[ids] == before).all())
        if unchanged:
            read()
        return unchanged

    def _is_of(self, handover: HandOver, shard: int, ids: Ids) -> bool:
        """Return whether committing `ids` seals the shard: no copy is newer, and no other one pending."""
        arena, members, version = self._arena, self._members[shard], handover.version
        own = handover.ids[self._shard_of[handover.ids] == shard]
        if (arena.version[own] != version).any():
            return False  # a copy was torn, and an older one has taken its place
        if arena.whole != handover.whole:
            return False  # a partition was copied since, perhaps at the same step
        done = (arena.durable[members] == arena.version[members]) & ~self._encoded()[members]
        done[np.searchsorted(members, ids)] = True
        return bool((done & (arena.version[members] <= version) & arena.intact()[members]).all())


def adopt_orphans(arena: Arena, queue: HandOverQueue) -> int:
    """Queue complete copies that were never handed over, because their process died or failed after the copy.

    Returns the number of these partitions. Their extras are lost, so a resume combines them with older extras.
    """
    waiting = queue.pending()
    # Older copies than a waiting hand-over are saved with it.
    newest = max((handover.version for handover in waiting), default=NEVER)
    orphans = arena.pending() & arena.intact() & (arena.version >= newest)
    for handover in waiting:
        orphans[handover.ids[arena.version[handover.ids] == handover.version]] = False
    ids = np.flatnonzero(orphans)
    versions = arena.version[ids]
    for version in distinct(versions).tolist():
        queue.put(version=version, ids=ids[versions == version], extras=None)
    return int(ids.size)


def reconcile(arena: Arena, queue: HandOverQueue, states: Mapping[int, ShardState], epoch: int) -> None:
    """Bring the arena of a dead process, and its queue, into the epoch that begins now.

    states: states of the shards in the store.

    If the run has continued elsewhere, the store has newer copies of some partitions: those are spoiled, and never
    saved. All others count as copies of `epoch`. Pending ones will be committed in it, and must not look newer in the
    store than in the arena.
    """
    queue.sweep()
    arena.unseal()
    stored = np.full(arena.layout.partitions, NEVER, dtype=np.int64)
    for state in states.values():
        stored[state.ids] = state.version
        error = arena.encoding_error[state.ids]
        # Without a measured error the arena's copy will come from the store, so the two are equal.
        arena.encoding_error[state.ids] = np.where(state.encoded, np.maximum(error, 0.0), -1.0)
        if state.whole and state.whole == arena.whole:
            # The process died after it had committed the whole state, but before it noted the commit in the arena.
            arena.confirm(state.ids, state.version)
    stale = arena.lifted(stored) > arena.lifted(arena.version)
    arena.begin(np.flatnonzero(stale))
    old, waiting = arena.version.copy(), arena.pending()
    current = (old >= 0) & ~stale
    # In this order a process that dies or fails meanwhile leaves the old or the new queue complete. The next process
    # drops those hand-overs of the other queue that do not fit the copies.
    before = queue.pending()
    for handover in before:
        kept = current[handover.ids] & (old[handover.ids] == handover.version)
        ids = handover.ids[kept]
        sealed = handover.sealed and not stale.any() and bool((old[handover.ids] == handover.version).all())
        if ids.size or sealed:
            queue.put(
                version=pack(epoch, step_of(handover.version)),
                ids=ids,
                whole=handover.whole if sealed else "",
                extras=handover.extras,
                unsaved=None if handover.unsaved is None else handover.unsaved[kept],
                encoding=handover.encoding,
            )
    arena.relabel_all(current, waiting, epoch)
    for handover in before:
        queue.remove(handover.number)
