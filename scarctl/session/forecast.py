"""Predict the cost of a recovery in a training process, and choose its mode. All ranks choose the same one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.distances import from_memory
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.found_extras import Saved
from scarctl.errors import ScarError
from scarctl.recovery.plan import versions_of
from scarctl.session.peers import Together
from scarctl.state.extras import Extras
from scarctl.state.layouts import parameters_of
from scarctl.state.version import NEVER, step_of
from scarctl.store import ShardState, complete_sets
from scarctl.theory.history import History
from scarctl.util.arrays import Ids

if TYPE_CHECKING:
    from scarctl.theory.rework import Cost

log = logging.getLogger("scarctl")


MUCH_OLDER = 10
"""Times the mean age of the newest copies above which a state of one step is too old to be resumed from by itself."""


def weigh_loss(
    engine: Engine,
    ids: Ids,
    now: NDArray[np.float64],
    step: int,
    together: Together,
    mode: str,
    max_rework: float | None,
    before: int | None = None,
) -> tuple[str, Cost]:
    """Choose the mode of recovering `ids` in a process that has finished `step` iterations. Return it and its cost.

    now: distances (l2) of `ids` from their copies, NaN if unknown: float64 of the shape of `ids`. before: the newest
    step of a copy that may be taken.

    Raises ScarError (kind "too-much-rework") on all ranks.
    """

    def look() -> dict[str, Any]:
        arena = engine.arena
        # If live values are no longer finite, their last known distances are used.
        known = engine.settings.norm == "l2"
        distance = from_memory(arena.newest()) if known else np.full(arena.layout.partitions, np.nan)
        distance[ids] = np.where(np.isfinite(now), now, distance[ids])
        newest = step_of(arena.newest())
        newest = newest if before is None else np.minimum(newest, before)
        return _seen(engine, ids, step, newest, distance, engine.motion.history)

    return _decide(together.gather(together.agree(look)), engine, step, together, mode, max_rework)


def mode_of_resume(engine: Engine, found: tuple[ShardState, Saved | None] | None, together: Together) -> str:
    """Return the mode in which "auto" resumes the state of an earlier process: the same on all ranks.

    That is partial if all copies are of the step of the extras. Otherwise a state of one step is taken if it is no
    older than the extras. It may also be `MUCH_OLDER` times as old as the copies are on average.

    found: the store's state and the newest extras; None if a rank has no state.
    """
    step, copies = -1, np.empty(0, dtype=np.int64)
    if found is not None:
        arena, step = engine.arena, -1 if found[1] is None else step_of(found[1].version)
        stored = versions_of(found[0], np.arange(engine.layout.partitions))
        copies = np.maximum(step_of(np.where(arena.intact(), arena.newest(), NEVER)), step_of(stored))
    # Copies may be newer than the extras, if those could not be read.
    mine = [
        step,
        int(copies.sum()),
        copies.size,
        int(copies.min(initial=step)),
        int(copies.max(initial=step)),
    ]
    everyone = together.gather(mine)
    steps, total, count = (
        [one[0] for one in everyone],
        sum(o[1] for o in everyone),
        sum(o[2] for o in everyone),
    )
    newest = max(one[4] for one in everyone)
    if min(steps) < 0 or {step for one in everyone for step in (one[0], *one[3:])} == {newest}:
        return "partial"
    looked = together.gather(_back(engine, newest) if together.leads else None)
    back = next(one for one in looked if one)[0]
    mean = newest - total / max(1, count)
    if back is None or back > max(MUCH_OLDER * mean, newest - max(steps)):
        return "partial"
    return "rollback"


def _seen(
    engine: Engine, ids: Ids, step: int, newest: Ids, distance: NDArray[np.float64], history: History
) -> dict[str, Any]:
    """Return what one process knows about the loss: plain values, as small as possible."""
    from scarctl.theory.rework import grouped, mean_age

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
    from scarctl.theory.rework import Outlook, choose, mean_age, rework_of_loss

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
