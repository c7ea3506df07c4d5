"""Plan and carry out a recovery of all shares of a state: one plan, one sealed state, one report.

Each share is planned and carried out separately (`scarctl.recovery.plan`, `scarctl.recovery.execute`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.errors import NoIntactCopy
from scarctl.recovery.execute import SealedStateDamaged, Sink, execute_once, last_distances
from scarctl.recovery.label import NO_COMMIT, Writer, label_of, noted
from scarctl.recovery.plan import (
    Perturbation,
    Plan,
    count_tiers,
    estimate,
    plan_partial,
    plan_sealed,
)
from scarctl.recovery.report import Report
from scarctl.recovery.shares import Share, SharedState, damaged_snapshot
from scarctl.state.label import Label, Labelled
from scarctl.store import Snapshot
from scarctl.util.arrays import Ids

Arenas: TypeAlias = Sequence[Arena | None]
"""Arenas by share; None if a share has no arena, or if its copies are lost too."""


@dataclass(frozen=True, slots=True)
class SharedPlan(Labelled):
    """The plans of all shares; None for shares that need no restoring."""

    state: SharedState
    plans: tuple[Plan | None, ...]
    mode: str
    lost: int
    """Number of partitions that were named as lost."""
    label: Label
    """The label of all that the target has then, with the steps of the copies."""
    degraded: bool
    snapshot: str | None = None
    whole: str = ""
    """Identity of the commit of the whole state that contains all copies; see `recovery.plan.Plan`."""

    @property
    def step(self) -> int | None:
        """Step of all copies; None when steps are mixed."""
        return self.label.step

    @property
    def encoded(self) -> int:
        """Number of copies to restore that were encoded."""
        return sum(plan.encoded for _, plan in self.each())

    @property
    def noun(self) -> str:
        """The word for a process that saved the state: "rank" or "member"."""
        return "rank" if self.state.topology is None else self.state.topology.noun

    @property
    def restored(self) -> int:
        """Number of partitions to restore."""
        return sum(len(plan.ids) for _, plan in self.each())

    @property
    def nbytes(self) -> int:
        """Bytes to restore."""
        return sum(plan.nbytes for _, plan in self.each())

    @property
    def version(self) -> Ids:
        """Versions of all copies to restore: int64."""
        return np.concatenate([plan.version for _, plan in self.each()] or [np.empty(0, np.int64)])

    @property
    def seqs(self) -> dict[int, int]:
        """Rollback: the sealed record to restore, by shard, including shards of ranks that own nothing."""
        seqs = {plan.state.shard: plan.seq for _, plan in self.each() if plan.seq is not None}
        seals = [(shard, seal) for shard, state in self.state.states.items() for seal in state.sealed]
        wanted = {seal.whole for shard, seal in seals if seqs.get(shard) == seal.seq}
        others = {shard: seal.seq for shard, seal in seals if shard not in seqs and seal.whole in wanted}
        return seqs | others

    def each(self) -> Iterator[tuple[Share, Plan]]:
        """Yield the shares with partitions to restore, and their plans."""
        for share, plan in zip(self.state.shares, self.plans, strict=True):
            if plan is not None and len(plan.ids):
                yield share, plan

    def settled(self, survivors: str = "") -> SharedPlan:
        """Return the plan with `label`, `degraded` and `whole` derived from all its parts.

        survivors: identity of the commit of the whole state that contains all surviving values; "" if unknown.
        """
        parts = [plan for _, plan in self.each()]
        if not parts:
            return self
        degraded = self.degraded or any(plan.degraded for plan in parts)
        names = {plan.whole for plan in parts}
        whole = names.pop() if len(names) == 1 else ""
        of_one = bool(whole)
        if self.mode != "rollback":
            everything = self.restored == sum(layout.partitions for layout in self.state.layouts)
            of_one = of_one and not degraded and (everything or whole == survivors)
        label = self.label if whole == self.whole else Label()
        done = replace(self, label=label, degraded=degraded, whole=whole)
        return replace(done, label=label_of(done, of_one=of_one))

    def labelled(self, arenas: Arenas) -> SharedPlan:
        """Return the plan with what was saved with its state."""
        if not self.whole:
            return self
        writers, known = list[Writer](), set[int]()
        for share, plan, arena in zip(self.state.shares, self.plans, arenas, strict=True):
            states = [*(() if plan is None else [plan.state]), share.state]
            writers.append(Writer(states, arena))
            known.add(share.state.shard)
        # Ranks without rows have saved what they have in common with others, too.
        others = (state for shard, state in self.state.states.items() if shard not in known)
        writers += [Writer([state]) for state in others]
        return replace(self, label=noted(self.label, self.state.store, writers, self.whole))

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a report: those of `recovery.plan.Plan`, and with several ranks those by rank."""
        topology = self.state.topology
        tiers = [plan.tier for _, plan in self.each()]
        lines = [(share, line) for share, plan in self.each() for line in plan.to_json()["shards"]]
        fields = {
            "mode": self.mode,
            **self.label.to_json(),
            "degraded": self.degraded,
            "step": self.step,
            "snapshot": self.snapshot,
            "lost_partitions": self.lost,
            "restored_partitions": self.restored,
            "bytes": self.nbytes,
            "tiers": count_tiers(np.concatenate(tiers)) if tiers else {},
            "encoded_partitions": self.encoded,
        }
        if topology is None:
            return {**fields, "shards": [line for _, line in lines]}
        return {
            **fields,
            "shards": [
                {"rank": share.rank, **line, "age": max(0, self.state.head_of(share) - line["oldest_step"])}
                for share, line in lines
            ],
            "ranks": {
                "world": topology.world,
                "lost": [
                    share.rank for share, plan in self.each() if len(plan.ids) == share.layout.partitions
                ],
            },
        }


def plan_lost(state: SharedState, ids: Sequence[Ids], arenas: Arenas, *, survivors: str = "") -> SharedPlan:
    """Plan to restore every partition of `ids` (by share, ascending) from the freshest intact tier.

    survivors: see `SharedPlan.settled`. Raises NoIntactCopy, Corruption.
    """
    plans: list[Plan | None] = []
    for share, mine, arena in zip(state.shares, ids, arenas, strict=True):
        share.require(mine)
        if mine.size:
            plans.append(plan_partial(mine, share.layout, share.shard_of, share.state, arena))
        else:
            plans.append(None)
    lost = sum(len(mine) for mine in ids)
    hidden = bool(state.hidden)
    made = SharedPlan(state, tuple(plans), "partial", lost, Label(), hidden).settled(survivors)
    return made.labelled(arenas)


def plans_back(
    state: SharedState, arenas: Arenas, lost: int, snapshot: Snapshot | None
) -> Iterator[SharedPlan]:
    """Yield plans that restore everything to a state that all shares sealed, newest first, or to the snapshot.

    lost: number of lost partitions. Raises Corruption.
    """
    passed_over = snapshot is None and bool(state.lost_seals)
    for one in state.sealed() if snapshot is None else [snapshot]:
        try:
            plans = [
                plan_sealed(share.store, share.layout, share.shard_of, one, arena)
                for share, arena in zip(state.shares, arenas, strict=True)
            ]
        except NoIntactCopy as error:
            if snapshot is not None:
                raise damaged_snapshot(snapshot.name, error.message) from error
            passed_over = True  # collected or damaged
            continue
        name = None if snapshot is None else snapshot.name
        label = Label(one.step, one.step, () if one.whole else (NO_COMMIT,))
        plan = SharedPlan(state, tuple(plans), "rollback", lost, label, passed_over, name, one.whole)
        yield plan.settled().labelled(arenas)
        passed_over = True


def no_way_back(state: SharedState) -> NoIntactCopy:
    """Return the error for a rollback for which no plan of `plans_back` succeeded."""
    return NoIntactCopy(
        f"the store has no intact state that every {'rank' if state.topology else 'shard'} sealed at the same step",
        hint="nothing was changed; --mode partial restores parts that are intact, by name",
        kind="no-sealed-state",
    )


@dataclass(frozen=True, slots=True)
class SharedReport:
    """The result of a plan that was carried out."""

    plan: SharedPlan
    perturbation: Perturbation
    seconds: float
    problems: tuple[str, ...]
    """Descriptions of damaged copies, for display."""


def execute_shared(plan: SharedPlan, arenas: Arenas, sinks: Sequence[Sink]) -> SharedReport:
    """Write every share's partitions to its sink, verified, as `scarctl.recovery.execute.execute_once` does.

    sinks: one for every share. Raises NoIntactCopy: SealedStateDamaged if the caller should try an older sealed state.
    """
    reports: dict[int, Report] = {}
    try:
        for k, one in enumerate(plan.plans):
            if one is not None and len(one.ids):
                reports[k] = execute_once(one, plan.state.shares[k].store, arenas[k], sinks[k])
    except SealedStateDamaged as damage:
        if plan.snapshot is None:
            raise
        raise damaged_snapshot(plan.snapshot, damage.message) from damage
    plans = tuple(reports[k].plan if k in reports else None for k in range(len(plan.plans)))
    done = replace(plan, plans=plans).settled()
    if plan.mode != "rollback":
        # An older copy with the same bytes is as good.
        of_one = plan.label.of_one and done.whole == plan.whole and done.step is not None
        mixed = () if of_one else done.label.mixed or plan.label.mixed
        done = replace(done, label=replace(done.label, mixed=mixed))
    return SharedReport(
        done,
        _together([report.perturbation for report in reports.values()]),
        sum(report.seconds for report in reports.values()),
        tuple(dict.fromkeys(text for report in reports.values() for text in report.problems)),
    )


def estimated(plan: SharedPlan, arenas: Arenas) -> Perturbation:
    """Estimate the perturbation before the plan is carried out."""
    known = [
        np.full(len(one.ids), np.nan) if arena is None else last_distances(one, arena)
        for one, arena in zip(plan.plans, arenas, strict=True)
        if one is not None
    ]
    return estimate(np.concatenate(known or [np.empty(0)]))


class DiscardingSink:
    """A sink that discards everything, to check that all copies are intact."""

    arena: Arena | None = None

    def room(self, group: int, ids: Ids) -> None:
        """Return None."""

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Any]) -> None:
        """Discard the partitions."""


def _together(each: Sequence[Perturbation]) -> Perturbation:
    if len(each) == 1:
        return each[0]
    values = [one.value for one in each if one.value is not None]
    if len(values) < len(each):
        return Perturbation(None, "unknown")
    norm = math.sqrt(math.fsum(value * value for value in values))
    if not math.isfinite(norm):
        return Perturbation(None, "unknown")
    return Perturbation(norm, "measured" if all(one.kind == "measured" for one in each) else "estimated")
