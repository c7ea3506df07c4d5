"""Check what a caller wants to commit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.state.version import MAX_STEP, pack
from scarctl.store.segment import ascending
from scarctl.store.shard_state import ShardState
from scarctl.util.arrays import Ids


def checked_ids(
    state: ShardState, ids: Ids, step: int, floor: int, *, sealed: bool, extras: object | None
) -> Ids:
    """Return `ids` in ascending order, if they may be committed as of `step` to the lane with this state.

    floor: the step of the writer's newest commit.

    Raises UsageError.
    """
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is not in 0..{MAX_STEP}")
    if step < floor:
        raise UsageError(
            f"step {step} goes backwards: step {floor} is saved already",
            hint="steps must not decrease; after a rollback open the store again",
        )
    unique = ascending(ids)
    if len(unique) != np.size(ids):
        raise UsageError("a partition is listed twice")
    at = state.require_members(unique)
    if not len(unique) and not sealed and extras is None:
        raise UsageError("nothing to commit: no partitions, no extras and not sealed")
    if sealed:
        assert state.layout is not None, "the first record came first"
        state.require_sealable(at, state.layout)
    return unique


def checked_versions(
    state: ShardState, ids: Ids, epoch: int, step: int, steps: Ids
) -> NDArray[np.int64] | None:
    """Return the version of each copy of `ids` (ascending), if they are of these steps; None if all are of `step`.

    Raises UsageError if there is not one step for each, from 0 to `step`, or a saved copy is newer.
    """
    if len(steps) != len(ids):
        raise UsageError(f"{len(steps)} steps are given for {len(ids)} partitions")
    if bool((steps == step).all()):
        return None
    if int(steps.min()) < 0 or int(steps.max()) > step:
        raise UsageError(f"a commit of step {step} can have copies of steps 0 to {step} only")
    versions = steps + np.int64(pack(epoch, 0))
    if (back := versions < state.version[state.find(ids)]).any():
        raise UsageError(f"partition {int(ids[back][0])}: its saved copy is newer than step {steps[back][0]}")
    return versions
