"""Plan a recovery from copies that are not later than a step, because later ones may have wrong values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.recovery.label import label_of
from scarctl.recovery.plan import MEMORY, STORE, Plan, no_copy, versions_of
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import ShardState, Store
from scarctl.store.older import state_before
from scarctl.util.arrays import Ids


def in_memory_before(arena: Arena, ids: Ids, before: int) -> NDArray[np.bool_]:
    """Return whether memory's copy of each of `ids` is intact and of step `before` or earlier: bool of their shape.

    A copy that later checkpoints have found unchanged is of the step at which it was made, too.
    """
    own = arena.version[ids]
    return arena.intact()[ids] & (own >= 0) & (step_of(own) <= before)


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
    near = in_memory_before(arena, ids, before)
    tier = np.where(near, MEMORY, STORE).astype(np.int8)
    newest = arena.newest()[ids]
    version = np.where(step_of(newest) <= before, newest, arena.version[ids])
    older = state_before(store.log(state.shard), state, ids[~near], before)
    version[~near] = versions_of(older, ids[~near])
    missing = ids[version < 0]
    if missing.size:
        raise no_copy(f"no copy of step {before} or earlier:", layout, missing, [])
    doubt = bool(older.doubt.any())
    plan = Plan(
        "partial", layout, shard_of, len(ids), ids, tier, version, older, "", degraded=doubt, before=before
    )
    return replace(plan, label=label_of(plan, of_one=False))
