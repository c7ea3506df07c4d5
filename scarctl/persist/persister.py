"""Make hand-overs durable: commit copies from the arena to the store, then acknowledge them in the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.queue import HandOver, HandOverQueue
from scarctl.errors import Corruption, Overwritten, ScarError
from scarctl.persist.speed import Meter
from scarctl.state.layout import members_by_shard
from scarctl.state.version import NEVER, pack, step_of
from scarctl.store import Collector, ShardState, StoreWriter
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")

_ATTEMPTS = 8
"""How often a segment may be spoiled by newer copies before the hand-over is put off."""
_TIDY_PAUSE = 30.0  # seconds after a failure


class PutOff(Exception):
    """A hand-over is not written to its end: a pause, or another process that wants the store, comes first."""


class Persister:
    """Commits hand-overs, all shards of one at once. Not for several threads at once."""

    def __init__(self, arena: Arena, writer: StoreWriter, shard_of: NDArray[np.int32]) -> None:
        self.meter = Meter()
        """How fast the store takes what is committed."""
        self.put_off = threading.Event()
        """Set by another thread: what is being written is given up, and `PutOff` raised."""
        self._arena = arena
        self._writer = writer
        self._collector = Collector(writer)
        self._tidy_at = 0.0
        self._members = members_by_shard(shard_of)
        if not self._members and writer.store.part is not None:
            # A rank that owns nothing has extras all the same.
            self._members = {writer.store.part.shard: np.empty(0, dtype=np.int64)}
        self._shard_of = shard_of
        self._sealed: tuple[int, set[int]] = (
            -1,
            set(),
        )  # of one hand-over: the shards that are sealed already

    def check(self, handover: HandOver) -> None:
        """Raise Corruption if it names partitions that the layout does not have."""
        if handover.ids.size and handover.ids[-1] >= self._arena.layout.partitions:
            raise Corruption(f"hand-over {handover.number} names partitions that do not exist")

    def persist(self, handover: HandOver) -> int:
        """Make a hand-over durable and acknowledge it in the arena; returns the bytes of state written.

        May be called again after a failure: what is durable by then is not written again. Partitions that have a newer
        copy by now are left to the hand-over of that copy. Raises what `StoreWriter.commit` raises, and PutOff.
        """
        arena, version = self._arena, handover.version
        if self._sealed[0] != handover.number:
            self._sealed = handover.number, set()
        already = self._sealed[1]
        with self._reading(handover):
            self._persist_older(handover)
            ids = handover.ids[arena.version[handover.ids] == version]
            ids = ids[arena.durable[ids] != version]
            shard_of = self._shard_of[ids]
            parts = [(shard, ids[shard_of == shard]) for shard in self._members if shard not in already]
            parts = [(shard, own) for shard, own in parts if own.size or handover.sealed]
            written = self._commit_all(parts, handover, already)
        if len(already) == len(self._members):
            arena.seal(version)
        return written

    @contextmanager
    def _reading(self, handover: HandOver) -> Iterator[None]:
        """Note in the arena what is read inside. It may be noted earlier that the reading has ended."""
        self._arena.read_begins(handover.version)
        try:
            yield
        finally:
            self._arena.read_ends(0)

    def tidy(self, limit: int) -> bool:
        """Keep the store small: work that moves about `limit` bytes. Returns whether there may be more to do.

        Never raises: what fails is logged, and tried again after a while. Saving does not depend on it.
        """
        if time.monotonic() < self._tidy_at:
            return False
        done = self._collector.done
        before = done.moved_bytes
        try:
            while not self.put_off.is_set() and self._collector.turn():
                if done.moved_bytes - before >= limit:
                    return True
        except (ScarError, OSError, MemoryError) as error:
            log.warning("old copies cannot be collected now: %s", error)
            self._tidy_at = time.monotonic() + _TIDY_PAUSE
        return False

    @property
    def space(self) -> dict[str, Any]:
        """Bytes that saving and collecting have written, for people."""
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
        """Commit the ids of every shard of `parts`, all at once, and add those that are sealed now to `already`.

        Returns the bytes written.
        """
        sizes = self._arena.layout.partition_bytes
        unread = {shard for shard, _ in parts}
        committed: dict[int, tuple[Ids, bool]] = {}

        def read(shard: int) -> None:
            unread.discard(shard)
            if not unread:
                # The rest, which may take long, is up to the store: what is in memory may change now.
                self._arena.read_ends(handover.number)

        try:
            self._commit_each(parts, handover, committed, read)
        finally:
            already.update(shard for shard, (_, sealed) in committed.items() if sealed)
        written = sum(int(sizes[ids].sum()) for ids, _ in committed.values())
        carrier = parts[0][0] if parts else None
        if written and carrier is not None and handover.extras is not None:
            ids, sealed = committed[carrier]
            if not ids.size and not sealed:
                # Newer copies took the place of all of them meanwhile; what others have saved needs extras nonetheless.
                step, none = step_of(handover.version), np.empty(0, dtype=np.int64)
                self._writer.commit(carrier, none, self._source, step=step, extras=handover.extras)
        return written

    def _commit_each(
        self,
        parts: list[tuple[int, Ids]],
        handover: HandOver,
        committed: dict[int, tuple[Ids, bool]],
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Commit the ids of every shard of `parts`, all at once, and note in `committed` what `_commit` returned.

        The first shard carries the extras. read: called for each shard when its copies are not needed any more. What
        one shard raises is raised when all have ended.
        """
        sizes = self._arena.layout.partition_bytes
        carrier = parts[0][0] if parts else None  # extras belong to the whole process: once is enough

        def commit(part: tuple[int, Ids]) -> BaseException | None:
            shard, ids = part
            try:
                with self.meter.commit():
                    extras = handover.extras if shard == carrier else None
                    committed[shard] = self._commit(shard, ids, handover, extras, partial(read, shard))
            except BaseException as error:  # not to be raised while other commits are under way
                return error
            return None

        ended = self._writer.store.blobs.write_each(commit, parts, lambda part: int(sizes[part[1]].sum()))
        if faults := [fault for fault in ended if fault is not None]:
            raise next((fault for fault in faults if not isinstance(fault, Exception)), faults[0])

    def _commit(
        self, shard: int, ids: Ids, handover: HandOver, extras: Any, read: Callable[[], object] = lambda: None
    ) -> tuple[Ids, bool]:
        """Commit what of `ids` has no newer copy, and acknowledge it.

        read: called when no copy is needed any more, and the commit is still under way.

        Returns which that were, and whether the shard is sealed now.
        """
        arena = self._arena
        for _ in range(_ATTEMPTS):
            # The generations come first: what is looked at later is of these copies, or the commit does not happen.
            before = arena.generation[ids].copy()
            # A copy that is newer, or under way, comes with its own hand-over.
            good = (arena.version[ids] == handover.version) & ((before & np.uint64(1)) == 0)
            ids, before = ids[good], before[good]
            sealed = handover.sealed and self._is_of(handover, shard, ids)
            if not ids.size and not sealed:
                read()
                return ids, False
            try:
                self._writer.commit(
                    shard,
                    ids,
                    partial(self._source_of, ids, before),
                    step=step_of(handover.version),
                    sealed=sealed,
                    whole=handover.whole if sealed else "",
                    extras=extras,
                    verify_source=partial(self._unchanged, ids, before, read),
                )
            except Overwritten:
                continue
            arena.acknowledge(ids, handover.version, before)
            return ids, sealed
        raise Overwritten(
            f"shard {shard}: copies keep changing while they are written", hint="it is tried again"
        )

    def _persist_older(self, handover: HandOver) -> None:
        """Commit the copies older than the hand-over that still wait: it took the place of theirs, or theirs was lost.

        They go first, for steps in the store do not go back.
        """
        arena = self._arena
        ids = np.flatnonzero(arena.pending() & arena.intact() & (arena.version < handover.version))
        versions = arena.version[ids]
        for version in np.unique(versions).tolist():
            of_version = ids[versions == version]
            shard_of = self._shard_of[of_version]
            older = HandOver(handover.number, version, of_version, whole="", extras=None)
            parts = [(shard, of_version[shard_of == shard]) for shard in np.unique(shard_of).tolist()]
            self._commit_each(parts, older, {})

    def _source(self, g: int, t: int, start: int, stop: int) -> memoryview:
        if self.put_off.is_set():
            raise PutOff
        self._arena.read_on()
        return self._arena.source(g, t, start, stop)

    def _source_of(
        self, ids: Ids, before: NDArray[np.uint64], g: int, t: int, start: int, stop: int
    ) -> memoryview:
        """Return rows of the arena. Raises Overwritten, before more is written in vain, when a copy in them changed."""
        base, rows = int(self._arena.layout.base[g]), self._arena.layout.groups[g].rows_per_partition
        first, last = np.searchsorted(ids, (base + start // rows, base + -(-stop // rows)))
        if (self._arena.generation[ids[first:last]] != before[first:last]).any():
            raise Overwritten("copies have changed while they were written", hint="it is tried again")
        return self._source(g, t, start, stop)

    def _unchanged(self, ids: Ids, before: NDArray[np.uint64], read: Callable[[], object]) -> bool:
        unchanged = bool((self._arena.generation[ids] == before).all())
        if unchanged:
            read()
        return unchanged

    def _is_of(self, handover: HandOver, shard: int, ids: Ids) -> bool:
        """Return whether the whole shard is of the version once `ids` are committed: nothing newer, nothing waiting."""
        arena, members, version = self._arena, self._members[shard], handover.version
        own = handover.ids[self._shard_of[handover.ids] == shard]
        if (arena.version[own] != version).any():
            return False  # a copy was spoiled, and an older one has taken its place
        if arena.whole != handover.whole:
            return False  # something was copied since, perhaps as of the same step
        done = arena.durable[members] == arena.version[members]
        done[np.searchsorted(members, ids)] = True
        return bool((done & (arena.version[members] <= version) & arena.intact()[members]).all())


def adopt_orphans(arena: Arena, queue: HandOverQueue) -> int:
    """Queue copies that are complete but were never handed over, because their process died or failed in between.

    Returns how many partitions those are. Their extras are lost: they come back with the newest older ones.
    """
    waiting = queue.pending()
    # What is older than a hand-over that waits is saved with that.
    newest = max((handover.version for handover in waiting), default=NEVER)
    orphans = arena.pending() & arena.intact() & (arena.version >= newest)
    for handover in waiting:
        orphans[handover.ids[arena.version[handover.ids] == handover.version]] = False
    ids = np.flatnonzero(orphans)
    versions = arena.version[ids]
    for version in np.unique(versions).tolist():
        queue.put(version=version, ids=ids[versions == version], extras=None)
    return int(ids.size)


def reconcile(arena: Arena, queue: HandOverQueue, states: Mapping[int, ShardState], epoch: int) -> None:
    """Bring an arena that a dead process left, and its queue, into the epoch that begins now.

    states: of the shards in the store.

    Copies that the store has newer, since the run has continued elsewhere, are spoiled and never reach the store. All
    others count as saved in `epoch`: what of them still waits will be committed in it, and must not look newer in the
    store than in the arena.
    """
    queue.sweep()
    arena.unseal()
    stored = np.full(arena.layout.partitions, NEVER, dtype=np.int64)
    for state in states.values():
        stored[state.ids] = state.version
        if state.whole and state.whole == arena.whole:
            # The process died after it had committed the whole state, and before it had noted that here.
            arena.confirm(state.ids, state.version)
    stale = arena.lifted(stored) > arena.lifted(arena.version)
    arena.begin(np.flatnonzero(stale))
    old, waiting = arena.version.copy(), arena.pending()
    current = (old >= 0) & ~stale
    # In this order a process that dies or fails in between leaves the old queue or the new one, whole, and whatever of
    # the other does not fit the copies is dropped by the next.
    before = queue.pending()
    for handover in before:
        ids = handover.ids[current[handover.ids] & (old[handover.ids] == handover.version)]
        sealed = handover.sealed and not stale.any() and bool((old[handover.ids] == handover.version).all())
        if ids.size or sealed:
            queue.put(
                version=pack(epoch, step_of(handover.version)),
                ids=ids,
                whole=handover.whole if sealed else "",
                extras=handover.extras,
            )
    arena.relabel_all(current, waiting, epoch)
    for handover in before:
        queue.remove(handover.number)
