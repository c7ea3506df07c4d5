"""Continue with the memory of a dead process: queue what the store lacks, and bring the copies into a new epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.queue import HandOver, HandOverQueue
from scarctl.state.version import NEVER, pack, step_of
from scarctl.store import ShardState
from scarctl.util.arrays import distinct


def adopt_orphans(arena: Arena, queue: HandOverQueue, *, whole: bool = False) -> int:
    """Queue complete copies that were never handed over, because their process died or failed after the copy.

    whole: only if they are of one step, with its extras.

    If all copies are of the newest memory checkpoint, they are queued as that, with its extras. Otherwise the process
    died within a copy: then the checkpoint's own are queued with its extras, and newer ones without.

    Returns the number of these partitions.
    """
    waiting = queue.pending()
    noted = _queue_moment(arena, queue, waiting, whole)
    if whole:
        return 0 if noted is None else int(noted.ids.size)
    if noted is not None:
        waiting.append(noted)
    # Older copies than a waiting hand-over are saved with it.
    newest = max((handover.version for handover in waiting), default=NEVER)
    orphans = arena.pending() & arena.intact() & (arena.version >= newest)
    for handover in waiting:
        ids, staged = handover.ids, handover.staged
        there = arena.version[ids] == handover.version
        if staged is not None:  # another copy of the same step may have been made since
            there = (arena.version[ids] == staged.versions) & (arena.generation[ids] == staged.generation)
        orphans[ids[there]] = False
    ids = np.flatnonzero(orphans)
    versions = arena.version[ids]
    for version in distinct(versions).tolist():
        queue.put(version=version, ids=ids[versions == version], extras=None)
    older = arena.pending() & arena.intact() & (arena.version < newest)
    if not ids.size and older.any() and not any(one.staged is None for one in waiting):
        # A hand-over with rows of its own saves only these. One without saves all older copies.
        queue.put(version=newest, ids=ids, extras=None)
    return int(ids.size)


def _queue_moment(
    arena: Arena, queue: HandOverQueue, waiting: Sequence[HandOver], only_whole: bool
) -> HandOver | None:
    """Queue the newest memory checkpoint of a dead process, unless the store has it or it waits; return it."""
    moment = queue.moment()
    if moment is None or (moment.whole and any(one.whole == moment.whole for one in waiting)):
        return None
    pending = arena.pending() & arena.intact() & (arena.version <= moment.version)
    whole = moment.whole if moment.whole == arena.whole and bool(arena.intact().all()) else ""
    if not (pending.any() or (whole and arena.sealed < moment.version)) or (only_whole and not whole):
        return None
    ids = np.flatnonzero(pending & (arena.version == moment.version))  # older ones are saved with them
    number = queue.put(version=moment.version, ids=ids, whole=whole, extras=moment.extras)
    return replace(moment, number=number, ids=ids, whole=whole)


def reconcile(arena: Arena, queue: HandOverQueue, state: ShardState, epoch: int) -> None:
    """Bring the arena of a dead process, and its queue, into the epoch that begins now.

    state: the newest state in the store.

    If the run has continued elsewhere, the store has newer copies of some partitions: those are spoiled, and never
    saved. All others count as copies of `epoch`. Pending ones will be committed in it, and must not look newer in the
    store than in the arena.
    """
    queue.sweep()
    arena.unseal()
    stored = np.full(arena.layout.partitions, NEVER, dtype=np.int64)
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
    before, moment = queue.pending(), queue.moment()
    if moment is not None:
        whole = moment.whole if not stale.any() else ""
        queue.note(version=pack(epoch, step_of(moment.version)), whole=whole, extras=moment.extras)
    for handover in before:
        if handover.staged is not None:
            continue  # memory has these copies or newer ones, which are queued instead
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
