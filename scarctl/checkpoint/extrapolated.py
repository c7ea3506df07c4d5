"""Load lost partitions extrapolated beyond their saved values. The method: `scarctl.theory.extrapolation`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.movements import Movements
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.trend import Trend
from scarctl.recovery.plan import Plan
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.theory.extrapolation import Extrapolation, reach
from scarctl.util.arrays import Ids

_BATCH_BYTES = 64 << 20


def load_extrapolated(
    engine: Engine, live: LiveState, plan: Plan, step: int, *, exact: bool
) -> tuple[Extrapolation | None, Ids, NDArray[np.float64]]:
    """Copy the partitions of `plan` from the arena into the live tensors, extrapolated if the session extrapolates.


    exact: the whole state is of one step, and must stay so. Then nothing is extrapolated, and the first result is None.

    Returns the results of `extrapolate`.
    """
    if engine.trend is None or engine.movements is None or exact:
        live.load(plan.ids)
        return None, plan.ids[:0], np.empty(0)
    return extrapolate(live, engine.trend, engine.movements, plan.ids, plan.version, step)


def extrapolate(
    live: LiveState, trend: Trend, movements: Movements, ids: Ids, version: Ids, step: int
) -> tuple[Extrapolation, Ids, NDArray[np.float64]]:
    """Copy the partitions `ids` (ascending) from the arena into the live tensors, extrapolated to iteration `step`.

    version: the newest version whose values each copy has, int64 of the shape of `ids`.

    Returns the report, the partitions (ascending) whose live values now differ from the arena, and the l2 norms of the
    changes in their parameters. A norm is NaN or Inf if the parameter was not finite.
    """
    layout, arena = live.layout, live.arena
    factors, groups = trend.by_group(trend.fits.factor), layout.group_of(ids)
    # Training does not change a frozen group, even if it moved before it was frozen.
    factors[list(live.frozen)] = 0.0
    elapsed = step - step_of(version)
    wanted = (factors[groups] > 0) & (elapsed > 0) & ~_still(arena, trend)[ids]
    # If a seal found a copy unchanged, its last movement took longer than was noted.
    own = arena.version[ids]
    gap = movements.gap[ids] + step_of(version) - step_of(own)
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
    report = Extrapolation(
        partitions=len(moved),
        unknown=int(wanted.sum()) - len(moved),
        factors={layout.groups[g].name: float(factors[g]) for g in lost},
        expected_gain=trend.expected_gain(guesses),
    )
    return report, moved, np.concatenate([np.empty(0), *(one.distance for one in done)])


def _still(arena: Arena, trend: Trend) -> NDArray[np.bool_]:
    """Return which partitions equalled their copies at the last look, bool (partitions,).

    They stand still, as a row does that no batch has touched: only those that were copied at that look may move on.
    """
    copied = step_of(arena.version)
    still: NDArray[np.bool_] = (arena.distance == 0) & (
        copied < max(trend.looked, int(copied.max(initial=0)))
    )
    return still


def _batches(layout: Layout, groups: Ids, places: Ids) -> Iterator[tuple[int, Ids]]:
    """Yield the `places` (ascending) of partitions by group, in batches of bounded size."""
    for g in np.unique(groups[places]).tolist():
        mine, group = places[groups[places] == g], layout.groups[g]
        count = max(1, _BATCH_BYTES // max(1, group.rows_per_partition * group.tensors[0].row_bytes))
        for first in range(0, len(mine), count):
            yield g, mine[first : first + count]
