"""Predict the cost of a recovery in a training process, and choose its mode. All ranks choose the same one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.found_extras import Saved
from scarctl.errors import ScarError
from scarctl.session.peers import Together
from scarctl.state.extras import Extras
from scarctl.state.layouts import parameters_of
from scarctl.state.version import NEVER, step_of
from scarctl.store import ShardState, complete_sets
from scarctl.theory.history import History
from scarctl.theory.rework import Cost, Outlook, choose, grouped, mean_age, rework_of_loss
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")


def weigh_loss(
    engine: Engine,
    ids: Ids,
    now: NDArray[np.float64],
    step: int,
    together: Together,
    mode: str,
    max_rework: float | None,
) -> tuple[str, Cost]:
    """Choose the mode of recovering `ids` in a process that has finished `step` iterations. Return it and its cost.

    now: distances (l2) of `ids` from their copies, NaN if unknown: float64 of the shape of `ids`.

    Raises ScarError (kind "too-much-rework") on all ranks.
    """

    def look() -> dict[str, Any]:
        arena = engine.arena
        # If live values are no longer finite, their last known distances are used.
        known = engine.settings.norm == "l2"
        distance = arena.distance.copy() if known else np.full(len(arena.distance), np.nan)
        distance[ids] = np.where(np.isfinite(now), now, distance[ids])
        return _seen(engine, ids, step, step_of(arena.newest()), distance, engine.motion.history)

    return _decide(together.gather(together.agree(look)), engine, step, together, mode, max_rework)


def weigh_resume(
    engine: Engine, states: dict[int, ShardState], newest: Saved | None, together: Together
) -> tuple[str, Cost]:
    """Choose the mode of resuming the state of an earlier process. Return it and its predicted cost.

    newest: the newest extras. Iterations are counted from their step, because a partial recovery continues there.
    """
    step = max(together.gather(-1 if newest is None else step_of(newest.version)))

    def look() -> dict[str, Any]:
        arena = engine.arena
        stored = np.full(engine.layout.partitions, NEVER, dtype=np.int64)
        for state in states.values():
            stored[state.ids] = state.version
        copies = np.maximum(step_of(np.where(arena.intact(), arena.newest(), NEVER)), step_of(stored))
        known = engine.settings.norm == "l2" and arena.head_step == step and arena.intact().all()
        distance = arena.distance.copy() if known else np.full(len(copies), np.nan)
        distance[copies == step] = 0.0
        everything = np.arange(engine.layout.partitions)
        history = History() if newest is None else History.from_array(newest.extras.notes.points)
        return _seen(engine, everything, step, copies, distance, history)

    return _decide(together.gather(together.agree(look)), engine, step, together, "auto", None)


def _seen(
    engine: Engine, ids: Ids, step: int, newest: Ids, distance: NDArray[np.float64], history: History
) -> dict[str, Any]:
    """Return what one process knows about the loss: plain values, as small as possible."""
    parameters = parameters_of(engine.layout)
    mine = ids[parameters[ids]]
    all_ages = np.maximum(step - newest[mine], 0)
    old, counts = grouped(all_ages)
    norm = float(np.linalg.norm(distance[mine]))
    return {
        "norm": norm if np.isfinite(norm) else None,
        "age": mean_age(distance[mine], all_ages),
        "ages": old.tolist(),
        "counts": counts.tolist(),
        "parameters": int(parameters.sum()),
        "points": [list(point) for point in history.until(step).points],
        "sealed": step_of(engine.arena.sealed),
    }


def _decide(
    everyone: list[dict[str, Any]],
    engine: Engine,
    step: int,
    together: Together,
    mode: str,
    max_rework: float | None,
) -> tuple[str, Cost]:
    whole = sum(one["parameters"] for one in everyone)
    parts = [History(tuple(point) for point in one["points"]) for one in everyone if one["parameters"]]
    ages, counts = ([number for one in everyone for number in one[name]] for name in ("ages", "counts"))
    known = [one["norm"] for one in everyone if one["ages"]]
    norm = None if None in known else float(np.linalg.norm(known)) if known else 0.0
    moved = [(one["norm"], one["age"]) for one in everyone if one["age"] is not None]
    age = mean_age(*np.array(moved).T) if norm and moved else None
    outlook, share = Outlook.of(step, parts), sum(counts) / max(1, whole)
    rework = rework_of_loss(outlook, norm, ages, share, counts=counts, age=age)
    sealed = {one["sealed"] for one in everyone}
    back: int | None
    if mode == "partial":
        # The store may be unreachable, and is not asked: memory may have all needed copies.
        back = step - sealed.pop() if len(sealed) == 1 and min(sealed) >= 0 else None
    else:
        # One rank reads the store for all, so that all choose the same mode.
        looked = together.gather(_back(engine, step) if together.leads else None)
        back = next(found for found in looked if found)[0]
    choice = choose(mode, rework, back, max_rework)
    return choice.mode, choice.cost(rework, back)


def _back(engine: Engine, step: int) -> list[int | None]:
    """Return a list with the cost of a rollback: iterations since the newest state of one step; None: unknown."""
    try:
        part = engine.store.part
        of = None if part is None else part.shard
        sealed = next(iter(complete_sets(engine.store.again(), of=of)), None)
    except ScarError as error:
        # A requested rollback raises this error itself, if it persists.
        log.warning("the cost of a rollback is unknown: %s", error)
        return [None]
    return [None if sealed is None else max(0, step - sealed.step)]


def shared_history(engine: Engine, extras: Extras | None, step: int, together: Together) -> History:
    """Return the history of a session that continues from `step` with these extras: the points that all ranks have.

    All ranks then have equal points, even if some ranks lost points. A rank without parameters has no points.
    """
    stored = History() if extras is None else History.from_array(extras.notes.points)
    mine = stored.until(step).points
    measures = bool(parameters_of(engine.layout).any())
    everyone = together.gather([[start, gap] for start, gap, _ in mine] if measures else None)
    common = [{(start, gap) for start, gap in one} for one in everyone if one is not None]
    return History(point for point in mine if all(point[:2] in one for one in common))
