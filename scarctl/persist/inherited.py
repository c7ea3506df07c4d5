"""Continue with the memory of a dead process: ask for what the store lacks, and bring the copies into a new epoch."""

from __future__ import annotations

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.state.version import NEVER, pack, step_of
from scarctl.store import ShardState


def adopt(arena: Arena, *, whole: bool = False) -> None:
    """Ask for everything in memory that the store lacks: its process may have died before it did.

    whole: only if the copies are of one state.
    """
    if arena.slot.moment and arena.lacking() and (arena.whole or not whole):
        arena.ask(whole=True)


def reconcile(arena: Arena, state: ShardState, epoch: int) -> None:
    """Bring the arena of a dead process into the epoch that begins now.

    state: the newest state in the store.

    The store may have newer copies of some partitions, if the arena is a replica: memory then has no copy of those. All
    others count as copies of `epoch`. Pending ones will be committed in it, and must not look newer in the store than
    in the arena.
    """
    arena.settle()
    slot = arena.slot
    stored = np.full(arena.layout.partitions, NEVER, dtype=np.int64)
    stored[state.ids] = state.version
    error = arena.encoding_error[state.ids]
    # Without a measured error the arena's copy will come from the store, so the two are equal.
    arena.encoding_error[state.ids] = np.where(state.encoded, np.maximum(error, 0.0), -1.0)
    if state.whole and state.whole == slot.whole:
        # The process died after it had committed the whole state, but before it noted the commit in the arena.
        arena.acknowledge(state.ids, slot.version[state.ids], slot.moments[state.ids])
        arena.keep(slot.moment)
        arena.seal(slot.head)
    newest = slot.newest()
    stale = np.flatnonzero((arena.lifted(stored) > arena.lifted(newest)) & slot.intact())
    if stale.size:
        slot.version[:] = newest
        slot.name("")
        slot.moments[stale], slot.version[stale] = 0, NEVER
    there = slot.version >= 0
    slot.version[there] = pack(epoch, 0) | step_of(slot.version[there])
    if slot.moment:
        slot.stamp(slot.moment, pack(epoch, step_of(slot.head)), slot.whole)
    known = np.flatnonzero((arena.saved == slot.moments) & slot.intact())
    arena.acknowledge(known, slot.version[known], slot.moments[known])
