"""Make hand-overs durable: commit copies from the arena to the store, then acknowledge them in the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
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

        What one shard raises is raised when all have ended. Returns the bytes written.
        """
        carrier = parts[0][0] if parts else None  # extras belong to the whole process: once is enough
        sizes = self._arena.layout.partition_bytes

        def commit(part: tuple[int, Ids]) -> tuple[Ids, bool] | BaseException:
            try:
                with self.meter.commit():
                    return self._commit(*part, handover, handover.extras if part[0] == carrier else None)
            except BaseException as error:  # not to be raised while other commits are under way
                return error

        outcomes = self._writer.store.blobs.write_each(commit, parts, lambda part: int(sizes[part[1]].sum()))
        written, carried, faults = 0, True, []
        for (shard, _), outcome in zip(parts, list(outcomes), strict=True):
            if isinstance(outcome, BaseException):
                faults.append(outcome)
                continue
            done, sealed = outcome
            written += int(sizes[done].sum())
            if sealed:
                already.add(shard)
            if shard == carrier:
                carried = bool(done.size or sealed)
        if faults:
            raise next((fault for fault in faults if not isinstance(fault, Exception)), faults[0])
        if written and not carried and carrier is not None and handover.extras is not None:
            # Newer copies took the place of all of them meanwhile; what others have saved needs extras nonetheless.
            step, none = step_of(handover.version), np.empty(0, dtype=np.int64)
            self._writer.commit(carrier, none, self._source, step=step, extras=handover.extras)
        return written

    def _commit(self, shard: int, ids: Ids, handover: HandOver, extras: Any) -> tuple[Ids, bool]:
        """Commit what of `ids` has no newer copy, and acknowledge it.

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
                return ids, False
            try:
                self._writer.commit(
                    shard,
                    ids,
                    self._source,
                    step=step_of(handover.version),
                    sealed=sealed,
                    whole=handover.whole if sealed else "",
                    extras=extras,
                    verify_source=partial(self._unchanged, ids, before),
                )
            except Overwritten:
                continue
            arena.acknowledge(ids, handover.version, before)
            return ids, sealed
        raise Overwritten(
            f"shard {shard}: copies keep changing while they are written", hint="it is tried again"
        )

    def _persist_older(self, handover: HandOver) -> None:
        """Copies older than the hand-over that still wait: their own was lost, or could not be written.

        They go first, for steps in the store do not go back. All hand-overs before this one are durable by now.
        """
        arena = self._arena
        ids = np.flatnonzero(arena.pending() & arena.intact() & (arena.version < handover.version))
        versions = arena.version[ids]
        for version in np.unique(versions).tolist():
            of_version = ids[versions == version]
            older = HandOver(handover.number, version, of_version, whole="", extras=None)
            for shard in np.unique(self._shard_of[of_version]).tolist():
                self._commit(shard, of_version[self._shard_of[of_version] == shard], older, None)

    def _source(self, g: int, t: int, start: int, stop: int) -> memoryview:
        if self.put_off.is_set():
            raise PutOff
        return self._arena.source(g, t, start, stop)

    def _unchanged(self, ids: Ids, before: NDArray[np.uint64]) -> bool:
        return bool((self._arena.generation[ids] == before).all())

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
    orphans = arena.pending() & arena.intact()
    for handover in queue.pending():
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
