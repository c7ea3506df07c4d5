"""Restoring what was lost in a training process further along the way than it was saved: see `scarctl.extrapolation`.

What they are saved as lies in the arena; what they were before is read from the store, which may have it no more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from scarctl.engine import Engine
from scarctl.errors import ScarError
from scarctl.extrapolation import Extrapolation, reach
from scarctl.live import LiveState, Moved
from scarctl.recovery import Plan, versions_of
from scarctl.store import Batch, ShardState
from scarctl.trend import Trend, extrapolates
from scarctl.version import step_of

log = logging.getLogger("scarctl")
Ids = NDArray[np.int64]


def load_extrapolated(
    engine: Engine, live: LiveState, trend: Trend, plan: Plan, step: int
) -> tuple[Extrapolation, Ids, NDArray[np.float64]]:
    """Copy the partitions of `plan`, which the arena has, into the live tensors, extrapolated to iteration `step`.

    Those that cannot be are copied as they are. A store that is away is no error: then none can be.
    Returns beside what is to be told which partitions (ascending) live are not what the arena has, and by how much the
    parameter of each has changed, NaN or Inf where it was not finite.
    """
    layout, ids = engine.layout, plan.ids
    factors, groups = trend.by_group(trend.fits.factor), layout.group_of(ids)
    elapsed = step - step_of(plan.version)
    wanted = (factors[groups] > 0) & (elapsed > 0)
    done: list[Moved] = []
    guesses = np.zeros(len(factors))
    try:
        for shard in np.unique(plan.shard_of[ids[wanted]]).tolist():
            mine = np.flatnonzero(wanted & (plan.shard_of[ids] == shard))
            steps = step_of(plan.version[mine])
            for batch, gap in _older(engine, shard, ids[mine], steps, trend.since):
                g, reaches = batch.group, reach(elapsed[np.searchsorted(ids, batch.ids)], gap)
                moved = live.load_extrapolated(g, batch.ids, batch.tensors[0], reaches, float(factors[g]))
                guesses[g] += moved.guess.sum()
                done.append(moved)
    except ScarError as error:
        log.warning("older copies cannot be read; what was lost is restored as it was saved: %s", error)
    there = np.concatenate([ids[:0], *(moved.ids for moved in done)])
    distance = np.concatenate([np.empty(0), *(moved.distance for moved in done)])
    order = np.argsort(there)
    live.load(np.setdiff1d(ids, there, assume_unique=True))
    lost = [g for g in np.unique(groups[elapsed > 0]).tolist() if extrapolates(layout.groups[g])]
    told = Extrapolation(
        partitions=len(there),
        without_older=int(wanted.sum()) - len(there),
        factors={layout.groups[g].name: float(factors[g]) for g in lost},
        expected_gain=_expected_gain(trend, guesses),
    )
    return told, there[order], distance[order]


def _older(
    engine: Engine, shard: int, ids: Ids, steps: Ids, since: int
) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
    """The next older intact copies of `ids` (ascending) than those of `steps`, and by how many iterations they are.

    since: copies of earlier versions are of another run.
    """
    state: ShardState | None = engine.store.state(shard, engine.layout)
    while state is not None and ids.size:
        # What is collected meanwhile must not be replaced by what is newer.
        state.past = True
        versions = versions_of(state, ids)
        older = (versions >= 0) & (step_of(versions) < steps)
        corrupt: list[tuple[Ids, str]] = []
        for batch in engine.store.read(state, ids[older & (versions >= since)], corrupt=corrupt):
            yield batch, (steps - step_of(versions))[np.searchsorted(ids, batch.ids)]
        damaged = np.isin(ids, np.concatenate([ids[:0], *(bad for bad, _ in corrupt)]))
        left = (versions >= since) & (~older | damaged)
        ids, steps = ids[left], steps[left]
        state = engine.store.older(shard, ids, state) if ids.size else None


def _expected_gain(trend: Trend, guesses: NDArray[np.float64]) -> float | None:
    """By groups' squared guesses: groups that move further count more."""
    movement = trend.by_group(trend.fits.movement(guesses[trend.groups]))
    if not movement.sum() > 0:
        return None
    return float(np.average(trend.by_group(trend.fits.gain), weights=movement))
