"""Restoring what was lost in a training process, further along the way than it was saved (`scarctl.extrapolation`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from scarctl.engine import Engine
from scarctl.extrapolation import Extrapolation, reach
from scarctl.layout import Layout
from scarctl.live import LiveState
from scarctl.recovery import Plan
from scarctl.version import step_of

Ids = NDArray[np.int64]
_BATCH_BYTES = 64 << 20


def load_extrapolated(
    engine: Engine, live: LiveState, plan: Plan, step: int, *, exact: bool
) -> tuple[Extrapolation | None, Ids, NDArray[np.float64]]:
    """Copy the partitions of `plan`, which the arena has, into the live tensors, extrapolated to iteration `step` if
    that is wanted. exact: the whole state is of one step then, and stays so.

    Returns beside what is to be told which partitions (ascending) live are not what the arena has, and by how much the
    parameter of each has changed, NaN or Inf where it was not finite.
    """
    trend, movements, layout, ids = engine.trend, engine.movements, engine.layout, plan.ids
    if trend is None or movements is None or exact:
        live.load(ids)
        return None, ids[:0], np.empty(0)
    factors, groups = trend.by_group(trend.fits.factor), layout.group_of(ids)
    # What training does not change is where it was saved, however it moved before that.
    factors[list(live.frozen)] = 0.0
    elapsed = step - step_of(plan.version)
    wanted = (factors[groups] > 0) & (elapsed > 0)
    # What a seal has found as it was took all that time for its movement.
    own = engine.arena.version[ids]
    gap = movements.gap[ids] + step_of(plan.version) - step_of(own)
    known = (movements.version[ids] == own) & (movements.gap[ids] > 0)
    reaches = np.where(known, reach(elapsed, gap), 0.0)
    done = [
        live.load_extrapolated(g, ids[some], movements, factors[g] * reaches[some])
        for g, some in _batches(layout, groups, np.flatnonzero(wanted & known))
    ]
    moved = np.concatenate([ids[:0], *(one.ids for one in done)])
    live.load(np.setdiff1d(ids, moved, assume_unique=True))
    guesses = np.zeros(len(factors))
    squares = np.concatenate([np.empty(0), *(one.movement for one in done)])
    at = np.searchsorted(ids, moved)
    np.add.at(guesses, groups[at], squares * reaches[at] ** 2)
    lost = np.intersect1d(groups[elapsed > 0], trend.groups).tolist()
    told = Extrapolation(
        partitions=len(moved),
        unknown=int(wanted.sum()) - len(moved),
        factors={layout.groups[g].name: float(factors[g]) for g in lost},
        expected_gain=trend.expected_gain(guesses),
    )
    return told, moved, np.concatenate([np.empty(0), *(one.distance for one in done)])


def _batches(layout: Layout, groups: Ids, places: Ids) -> Iterator[tuple[int, Ids]]:
    """The `places` (ascending) of partitions by group, in batches of bounded size."""
    for g in np.unique(groups[places]).tolist():
        mine, group = places[groups[places] == g], layout.groups[g]
        count = max(1, _BATCH_BYTES // max(1, group.rows_per_partition * group.tensors[0].row_bytes))
        for first in range(0, len(mine), count):
            yield g, mine[first : first + count]
