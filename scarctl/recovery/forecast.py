"""Estimate from the extras of a store's checkpoints the convergence of its run, and the cost of a recovery.

It works without a running session, and without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.distances import from_memory, from_store, with_errors
from scarctl.errors import Corruption
from scarctl.recovery.plan import in_memory, versions_of
from scarctl.state.caveats import Caveat
from scarctl.state.common import in_common
from scarctl.state.extras import Notes
from scarctl.state.journal import Event, Sample, read_samples
from scarctl.state.layout import Layout
from scarctl.state.layouts import parameters_of
from scarctl.state.version import NEVER, step_of
from scarctl.store import ShardState, Store
from scarctl.theory.convergence import NoEstimate
from scarctl.theory.history import History
from scarctl.theory.rework import Choice, Cost, Outlook, Rework, choose, grouped, mean_age, rework_of_loss


class RunFacts(NamedTuple):
    """The facts in a store's newest extras about its run."""

    outlook: Outlook
    """The run's convergence."""
    norm: str = ""
    """Norm of the run's distances; "" if unknown."""
    caveats: tuple[Caveat, ...] = ()
    events: tuple[Event, ...] = ()
    """The run's starts, resumes and recoveries."""
    samples: tuple[Sample, ...] = ()
    """Ages of its copies over time; with several ranks, the first rank's."""


def stored_outlook(writers: Sequence[tuple[Store, ShardState]], step: int) -> RunFacts:
    """Return the facts in the newest extras about the run at `step`.

    writers: each writer's view of the store, with the state of its lane. One writer, or one for each rank that holds
    part of the state. Damaged extras raise no error: the outlook gives the reason.
    """
    parts, norm, caveats = [], "", dict[Caveat, None]()
    sealed = dict[str, list[Notes]]()
    events, samples = tuple[Event, ...](), list[Sample]()
    for store, state in writers:
        try:
            found = store.read_extras(state)
        except Corruption as error:
            return RunFacts(Outlook(step, NoEstimate(f"the run's extras are damaged: {error.message}")))
        notes = Notes.from_tree(None if found is None else found[1])
        norm, events = notes.norm, max(events, notes.events, key=len)
        samples = samples or read_samples(notes.samples)
        parts.append(History.from_array(notes.points).until(step))
        caveats |= dict.fromkeys(notes.caveats)
        if state.extras_whole:
            sealed.setdefault(state.extras_whole, []).append(notes)
    for of_one in sealed.values():
        known = {caveat.kind for caveat in caveats}
        caveats |= dict.fromkeys(one for one in in_common(of_one) if one.kind not in known)
    return RunFacts(Outlook.of(step, parts), norm, tuple(caveats), events, tuple(samples))


def rework_of(
    outlook: Outlook,
    share: float,
    *,
    ages: NDArray[np.int64],
    distance: NDArray[np.float64] | None,
    since: int = 0,
) -> Rework:
    """Predict the rework after a `share` of the parameters' partitions is restored from copies; see `rework_of_loss`.

    ages: iterations since each of those partitions was saved: int64 (partitions,). distance: their distances in the l2
    norm, `since` iterations ago: float64 (partitions,), or None if unknown.
    """
    if not ages.size:
        return Rework(0.0, 0.0, 0.0, "distances")
    norm = age = None
    if distance is not None and np.isfinite(distance).all():
        norm, age = float(np.linalg.norm(distance)), mean_age(distance, ages)
    old, counts = grouped(ages)
    return rework_of_loss(outlook, norm, old, share, counts=counts, age=age, since=since)


@dataclass(frozen=True, slots=True)
class Loss:
    """The lost partitions of one writer's part of the state: of a whole store, or of one rank."""

    store: Store
    state: ShardState
    layout: Layout
    ids: NDArray[np.int64]
    arena: Arena | None
    """Arena of the stopped run, for its last known distances of the lost values."""
    from_arena: bool
    """Whether the arena's copies can be restored."""


def weigh(
    losses: Sequence[Loss],
    sealed_step: int | None,
    mode: str,
    max_rework: float | None,
    *,
    apart: bool = False,
) -> tuple[Choice, Cost]:
    """Choose between partial recovery and rollback, and predict the cost.

    sealed_step: step of the state that a rollback restores; None if no such state exists. apart: the writers are
    members, which have no common step and converge alone.

    Raises ScarError (kind "too-much-rework").
    """
    step = max([0, *(loss.state.step for loss in losses)])
    step = max([step, *(loss.arena.head_step for loss in losses if loss.arena is not None)])
    outlook, norm, *_ = stored_outlook(
        [(loss.store, loss.state) for loss in losses if parameters_of(loss.layout).any()], step
    )
    if apart and len(losses) > 1:
        outlook = Outlook(step, NoEstimate("each member converges alone"))
    ages, distance, whole, since = [], [], 0, 0
    for loss in losses:
        newest, known = _copies(loss)
        parameters = parameters_of(loss.layout)
        whole += int(np.count_nonzero(parameters))
        lost = loss.ids[parameters[loss.ids]]
        ages.append(np.where(newest < 0, 0, np.maximum(step - newest, 0))[lost])
        distance.append(known[lost])
        if loss.arena is not None:
            last = int(loss.arena.newest().max(initial=NEVER))
            since = max(since, step - int(step_of(last)) if last >= 0 else 0)
    old = np.concatenate(ages)
    rework = rework_of(
        outlook,
        old.size / max(1, whole),
        ages=old,
        distance=np.concatenate(distance) if norm == "l2" else None,
        since=since,
    )
    back = None if sealed_step is None else max(0, step - sealed_step)
    choice = choose(mode, rework, back, max_rework)
    return choice, choice.cost(rework, back)


def _copies(loss: Loss) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the step of every partition's best copy, and its distance from the live value (NaN where unknown)."""
    count, arena = loss.layout.partitions, loss.arena
    stored = step_of(versions_of(loss.state, np.arange(count)))
    if arena is None:
        return stored, np.full(count, np.nan)
    memory = step_of(in_memory(arena)) if loss.from_arena else np.full(count, NEVER, dtype=np.int64)
    near, same = (
        (memory >= stored) & (memory >= 0),
        stored == step_of(np.maximum(arena.durable, arena.sealed)),
    )
    far = np.where(same, with_errors(from_store(arena), arena.encoding_error), np.nan)
    return np.maximum(stored, memory), np.where(near, from_memory(arena.newest()), far)
