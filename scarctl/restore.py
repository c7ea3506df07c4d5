"""Recovery inside a training process: store to arena, verified, then arena to live tensors.

The arena is the staging area. Live values are touched only when every partition that is needed has an intact copy
there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.adapter import Adapter
from scarctl.arrays import distinct
from scarctl.completing import complete, left_behind
from scarctl.daemon.kinship import require_same_line
from scarctl.engine import Engine
from scarctl.errors import UsageError
from scarctl.execution import Report, execute
from scarctl.extrapolating import load_extrapolated
from scarctl.extrapolation import Extrapolation
from scarctl.found_extras import newest_extras, sealed_extras
from scarctl.live import LiveState
from scarctl.prediction import MODES, Cost
from scarctl.recovery import MEMORY, Ids, Lost, Perturbation, Plan, estimate, plan_partial, plan_rollback
from scarctl.sinks import ArenaSink
from scarctl.store import ShardState, Snapshot, Store
from scarctl.store.saved import describe
from scarctl.together import Found, Together
from scarctl.version import NEVER, pack, step_of
from scarctl.weighing import shared_history, weigh_loss, weigh_resume

log = logging.getLogger("scarctl")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `Session.resume` found."""

    step: int
    """Iterations finished: the loop goes on with the next one. 0 when there was nothing to resume from."""
    exact: bool
    """Everything is of `step`: training continues as if it had not stopped. Otherwise steps are mixed."""
    report: Report | None
    """Where the partitions came from. None when there was nothing to resume from, and when others have saved the state
    in other parts: then all of it came from the store."""
    ranks: Mapping[str, Any] | None = None
    """With several ranks: which of them were lost, and what that costs; see `scarctl.ranks.agreement`."""
    reasons: tuple[str, ...] = ()
    """Why the state is not exact, a sentence each; () when it is."""
    saved_at: str | None = None
    """UTC time of the newest commit in the store, in ISO 8601; None when no record says it."""


def said(resumed: Resumed, store: Store) -> Resumed:
    """The same; one line of the log says what it is."""
    if not resumed.step and resumed.report is None:
        log.info("%s has nothing to resume from: a new run begins", store.url)
        return resumed
    exact = "exact" if resumed.exact else f"not exact: {'; '.join(resumed.reasons)}"
    line, report = f"resumed {store.url} at step {resumed.step}, {exact}", resumed.report
    if report is not None and report.plan.ids.size:
        oldest = int(step_of(report.plan.version).min())
        tiers = ", ".join(f"{count} partitions from {tier}" for tier, count in report.tiers.items())
        line += f"; oldest copy of step {oldest}; {tiers}"
    log.info("%s; %s", line, describe(resumed.saved_at))
    return resumed


def resume_live(
    engine: Engine, live: LiveState, mode: str, together: Together, snapshot: Snapshot | None = None
) -> tuple[Resumed, Any]:
    """Restore everything into a fresh process. Returns the extras too, None when there was nothing to resume from.

    Raises NoIntactCopy, Corruption, UsageError; then no live value was changed.
    """
    cost = None
    if mode == "auto":
        mode, cost = _weigh(engine, together)
    if mode == "rollback":
        report, extras = _roll_back(engine, live, together, snapshot=snapshot)
        assert report.step is not None
        _learnt(engine, extras, report.step, together)
        return Resumed(report.step, report.exact, replace(report, cost=cost)), extras
    # Meanwhile nothing moves from the queue to the store: extras would be seen in neither. Nor after a failure: what
    # waits may be of later steps than the one from which another attempt goes on.
    together.agree(engine.saver.stop)
    resumed, extras = _resume(engine, live, together)
    together.agree(engine.saver.resume)
    engine.adopt_orphans()
    if resumed.report is not None:
        resumed = replace(resumed, report=replace(resumed.report, cost=cost))
    return resumed, extras


def _learnt(engine: Engine, extras: Any, step: int, together: Together) -> None:
    """Go on from the state of `step`, with what a session had learnt of the run when it saved these extras."""
    engine.motion.go_on(shared_history(engine, extras, step, together))
    if engine.trend is not None:
        engine.trend.go_on(extras)


def _weigh(engine: Engine, together: Together) -> tuple[str, Cost | None]:
    """Which way to go on from what there is. Partial, without a cost, where some rank has nothing to go on from."""

    def look() -> tuple[dict[int, ShardState], tuple[int, str, Any] | None] | None:
        states = engine.store.states(engine.store.shards())
        return None if _never_complete(engine, states) else (states, newest_extras(engine, states))

    found = together.agree(look)
    everywhere = together.gather(found is not None)
    if found is None or not all(everywhere):
        return "partial", None
    return weigh_resume(engine, *found, together)


def _resume(engine: Engine, live: LiveState, together: Together) -> tuple[Resumed, Any]:
    arena = engine.arena
    found, report = together.agree(lambda: _fetch(engine))
    agreed = together.go_on(found, engine.store)
    if agreed is None:
        log.warning("%s holds no complete state yet: there is nothing to resume from", engine.store.url)
        engine.start_over()
        return Resumed(0, True, None), None
    step = agreed.step
    # Copies newer than the extras: the process died before it could hand them over. Random numbers, schedule and data
    # position are of the older step, so that is where the run goes on, and what it saves next comes after them. They
    # count as of the step before, so that they never pass for exact.
    ahead = np.flatnonzero(step_of(arena.newest()) > step)
    arena.relabel(ahead, pack(arena.epoch, max(0, step - 1)))
    _learnt(engine, agreed.extras, step, together)
    assert report is not None, "there is one where something is found"
    plan, exact = report.plan, agreed.exact
    told, _, _ = together.agree(lambda: load_extrapolated(engine, live, plan, step, exact=exact))
    report = _with(report, told)
    together.spread()
    return Resumed(step, agreed.exact, report, agreed.summary), agreed.extras


def _fetch(engine: Engine) -> tuple[Found | None, Report | None]:
    """Bring the freshest copies of everything into the arena. None when some partition has no copy anywhere."""
    arena = engine.arena
    states = engine.store.states(engine.store.shards())
    newest = None if _never_complete(engine, states) else newest_extras(engine, states)
    require_same_line(engine.arena, engine.store)
    if newest is None:
        if engine.layout.partitions or engine.store.part is None:
            return None, None
        newest = NEVER, "", None  # a rank that owns nothing, and has not sealed that yet, waits for nothing
    _believe_newest_seal(engine)
    known = estimate(arena.distance).value  # before the arena is filled up
    everything = np.arange(engine.layout.partitions)
    plan = plan_partial(everything, engine.layout, engine.shard_of, states, arena)
    _unseal_waiting(engine, plan)
    report = execute(plan, engine.store, arena, ArenaSink(arena))
    version, whole, extras = newest
    owns = bool(everything.size)
    of_one = report.exact and report.step == step_of(version) and report.plan.whole == whole
    exact = of_one if owns else extras is not None
    if owns and report.exact:
        arena.whole = report.plan.whole
    survived = exact and arena.head_step == step_of(version)
    return Found(version, extras, exact, survived, known, owns, whole), report


def _unseal_waiting(engine: Engine, plan: Plan) -> None:
    """Before other copies come into the arena: what waits may seal the state with those that were there."""
    if (plan.tier != MEMORY).any():
        engine.queue.unseal()


def _believe_newest_seal(engine: Engine) -> None:
    """What the newest hand-over seals is whole in memory, also while the store does not have it yet."""
    arena, waiting = engine.arena, engine.queue.pending()
    if not waiting or not waiting[-1].sealed or not arena.intact().all():
        return
    sealed = waiting[-1]
    if arena.whole == sealed.whole and (arena.version <= sealed.version).all():
        arena.sealed = max(arena.sealed, sealed.version)


def recover_live(
    engine: Engine,
    live: LiveState,
    adapter: Adapter,
    lost: Lost,
    mode: str,
    head_step: int,
    together: Together,
    max_rework: float | None = None,
) -> Report:
    """Restore what was lost in a running process, and the extras when that is a rollback.

    The report's problems name what is left that is not finite, on any rank, where a copy is.

    Raises UsageError, NoIntactCopy, ScarError (kind "too-much-rework"); then no live value was changed.
    """
    check_mode(mode)
    ids = together.lost_ids(lost, engine.layout, engine.store)
    now = together.agree(lambda: _distances(engine, live, ids))
    mode, cost = weigh_loss(engine, ids, now, head_step, together, mode, max_rework)
    if mode == "rollback":
        report, extras = _roll_back(engine, live, together, lost=ids.size)
        _learnt(engine, extras, report.step or 0, together)
        adapter.restore(extras["early"], extras["late"])
        left = together.agree(lambda: left_behind(engine, live, adapter, ids, extras["late"]))
        return _checked(replace(report, cost=cost), left, together)
    with _known_to_differ(engine, ids):
        report = together.agree(lambda: _fetch_lost(engine, live, ids, now, head_step))
    # One rank's part may be of one step, but not of that of the others.
    exact = report.exact and not together.several
    told, moved, changes = together.agree(
        lambda: load_extrapolated(engine, live, report.plan, head_step, exact=exact)
    )
    engine.equal(np.setdiff1d(ids, moved, assume_unique=True))
    if moved.size:
        engine.moved(live, moved)
        now[np.searchsorted(ids, moved)] = changes
        report = replace(report, perturbation=_perturbation(now, report.perturbation))
    report = _with(report, told)
    engine.motion.forget()
    if engine.trend is not None:
        engine.trend.forget(ids)
    left = together.agree(lambda: complete(engine, live, adapter, ids))
    together.spread()
    return _checked(replace(report, cost=cost), left, together)


def _checked(report: Report, left: list[str], together: Together) -> Report:
    """With what is left behind on all ranks."""
    everywhere = [text for theirs in together.gather(left) for text in theirs]
    return replace(report, problems=tuple(dict.fromkeys([*report.problems, *everywhere])))


def _with(report: Report, told: Extrapolation | None) -> Report:
    """What was extrapolated is no copy of any step, also where all copies are of one."""
    exact = report.exact and (told is None or not told.partitions)
    return replace(report, plan=replace(report.plan, exact=exact), extrapolation=told)


def _distances(engine: Engine, live: LiveState, ids: Ids) -> NDArray[np.float64]:
    """Distances of `ids` from their copies in memory, NaN where there is none: float64 of the shape of `ids`."""
    there = engine.arena.intact()[ids]
    found = np.full(ids.size, np.nan)
    found[there] = live.distances_at(ids[there])
    return found


def _fetch_lost(
    engine: Engine, live: LiveState, ids: Ids, now: NDArray[np.float64], head_step: int
) -> Report:
    """Bring the freshest copies of `ids` into the arena.

    now: their distances from what is there already; afterwards, from what is there then.
    """
    arena = engine.arena
    torn = ids[~arena.intact()[ids]]
    # The arena has the newest copies of all: the store is read only for what is not intact there.
    states = engine.store.states(distinct(engine.shard_of[torn]).tolist())
    if torn.size:
        require_same_line(arena, engine.store)
    known = arena.distance[ids]
    survivors = _survivors(engine, live, ids, head_step)
    plan = plan_partial(ids, engine.layout, engine.shard_of, states, arena, survivors=survivors)
    _unseal_waiting(engine, plan)
    report = execute(plan, engine.store, arena, ArenaSink(arena))
    if report.exact:
        arena.whole = report.plan.whole
    if report.step != head_step:
        # Extras, such as random numbers and step counts, stay those of now: the two together were never a state.
        report = replace(report, plan=replace(report.plan, exact=False))
    new = report.plan.tier != MEMORY
    now[new] = live.distances_at(ids[new])
    return replace(report, perturbation=_perturbation(now, estimate(known)))


def _survivors(engine: Engine, live: LiveState, ids: Ids, head_step: int) -> str:
    """The commit of the whole state, after `head_step`, that all live values but `ids` are of; "" for none."""
    arena = engine.arena
    if not arena.whole or step_of(int(arena.newest().max(initial=NEVER))) != head_step:
        return ""
    kept = np.delete(live.changed(), ids)
    return "" if kept.any() else arena.whole


def _roll_back(
    engine: Engine,
    live: LiveState,
    together: Together,
    lost: int | None = None,
    snapshot: Snapshot | None = None,
) -> tuple[Report, Any]:
    """Go back to the newest state that all shards sealed at one step; forget what came after, here and in the store."""
    known = engine.arena.distance.copy()
    # The newest sealed state may still be on its way to the store.
    together.agree(lambda: _drain(engine))
    everything = np.arange(engine.layout.partitions)

    def fetch(until: tuple[int, int, str] | None) -> tuple[Report, Any]:
        plan = plan_rollback(
            engine.store,
            engine.layout,
            engine.shard_of,
            engine.arena,
            lost=lost,
            until=until,
            snapshot=snapshot,
        )
        _unseal_waiting(engine, plan)
        report = execute(plan, engine.store, engine.arena, ArenaSink(engine.arena))
        report = replace(report, perturbation=_perturbation(live.distances(), estimate(known)))
        return report, sealed_extras(engine.store, report.plan)

    with _known_to_differ(engine, everything), contextlib.ExitStack() as stopped:
        # Only when nobody saves any more do all look at the same logs.
        together.agree(lambda: stopped.enter_context(engine.nothing_saved()))
        report, extras = together.agree(lambda: fetch(None))
        # Where a part is damaged somewhere, all go back to the newest state that everybody can read.
        found = together.gather(report.plan.sealed)
        while min(found) < max(found):
            until = min(found)
            report, extras = together.agree(partial(fetch, until))
            found = together.gather(report.plan.sealed)
        one = len(set(together.gather(report.plan.whole))) == 1
        report = replace(report, plan=replace(report.plan, exact=report.exact and one))
        together.agree(lambda: engine.forget_after(report.plan))
    live.load(everything)
    together.spread()
    engine.equal(everything)
    return report, extras


@contextlib.contextmanager
def _known_to_differ(engine: Engine, ids: Ids) -> Iterator[None]:
    """Where what is done within fails, the arena may have got other copies of `ids` than live values were compared
    with.
    """
    try:
        yield
    except BaseException:
        engine.tracker.moved(ids)
        raise


def _drain(engine: Engine) -> None:
    engine.saver.resume()
    engine.saver.drain(engine.settings.drain_timeout)


def check_mode(mode: str) -> None:
    """Raise UsageError for a mode that there is not."""
    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}", hint=f"use one of {', '.join(MODES)}")


def _perturbation(distance: NDArray[np.float64], otherwise: Perturbation) -> Perturbation:
    """Norm of the change in partitions that change by these distances, measured where live values are still numbers."""
    if np.isfinite(distance).all():
        return Perturbation(float(np.linalg.norm(distance)), "measured")
    return otherwise


def _never_complete(engine: Engine, states: Mapping[int, ShardState]) -> bool:
    """Whether some partition has no copy anywhere: the run died before its first checkpoint was whole."""
    there = engine.arena.intact()
    for state in states.values():
        there[state.ids[state.version >= 0]] = True
    return not there.all()
