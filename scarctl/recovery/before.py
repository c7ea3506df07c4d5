"""Plan a recovery from copies that are not later than a step, because later ones may have wrong values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.slot import Slot
from scarctl.recovery.label import label_of
from scarctl.recovery.plan import MEMORY, STORE, Plan, no_copy, versions_of
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import ShardState, Store
from scarctl.store.older import state_before
from scarctl.util.arrays import Ids


def in_memory_before(arena: Arena, ids: Ids, before: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether memory has a copy of each of `ids` of step `before` or earlier, and whether it is the older one.

    Both bool of the shape of `ids`: the copy is in either slot, and preferably in the current one. One that later
    checkpoints have found unchanged is of the step at which it was made, too.
    """

    def early(slot: Slot) -> NDArray[np.bool_]:
        own = slot.version[ids]
        found: NDArray[np.bool_] = slot.intact()[ids] & (own >= 0) & (step_of(own) <= before)
        return found

    newer = early(arena.slot)
    older = early(arena.spare) & ~newer
    return newer | older, older


def plan_before(
    ids: Ids,
    layout: Layout,
    shard_of: NDArray[np.int32],
    store: Store,
    state: ShardState,
    arena: Arena,
    before: int,
) -> Plan:
    """Plan to restore `ids` (ascending) from the newest copies of step `before` or earlier.

    state: the lane's newest state, if memory lacks one of those.

    Raises NoIntactCopy, naming the partitions, if any has no such copy; Unavailable, AccessDenied.
    """
    near, spare = in_memory_before(arena, ids, before)
    tier = np.where(near, MEMORY, STORE).astype(np.int8)
    version = np.empty(ids.size, np.int64)
    for slot, mine in ((arena.slot, ~spare), (arena.spare, spare)):
        newest = slot.newest()[ids[mine]]
        version[mine] = np.where(step_of(newest) <= before, newest, slot.version[ids[mine]])
    older = state_before(store.log(state.shard), state, ids[~near], before)
    version[~near] = versions_of(older, ids[~near])
    missing = ids[version < 0]
    if missing.size:
        raise no_copy(f"no copy of step {before} or earlier:", layout, missing, [])
    doubt = bool(older.doubt.any())
    plan = Plan(
        "partial", layout, shard_of, len(ids), ids, tier, version, older, "", degraded=doubt, before=before
    )
    plan = replace(plan, spare=ids[spare])
    return replace(plan, label=label_of(plan, of_one=False))
