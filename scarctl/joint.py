"""Recovery and export of a state that several ranks have saved, without any of them running.

Each rank's share is planned and carried out like a state of its own (`scarctl.recovery`, `scarctl.execution`); what is
here puts the shares together: which of them is meant by what was lost, one sealed state for all, one report.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.errors import Corruption, NoIntactCopy, UsageError
from scarctl.execution import Report, Sink, execute
from scarctl.layout import Layout, close_to
from scarctl.parts import Parts, find_parts
from scarctl.recovery import (
    Ids,
    Lost,
    Perturbation,
    Plan,
    count_tiers,
    estimate,
    lost_ids,
    plan_partial,
    plan_rollback,
)
from scarctl.store import (
    SealedSet,
    ShardState,
    Snapshot,
    Store,
    read_snapshot,
    sealed_sets,
    topology_epochs,
)
from scarctl.store.topology import alike, read_topology, sealed_by_all
from scarctl.version import step_of

log = logging.getLogger("scarctl")

_RANK = "rank:"


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has saved; or a process alone, all of it."""

    rank: int | None
    store: Store
    """As its writer sees it."""
    layout: Layout
    shard_of: NDArray[np.int32]
    states: Mapping[int, ShardState]


@dataclass(frozen=True, slots=True)
class Joint:
    """A whole state in shares. Those that have nothing are left out."""

    parts: Parts
    shares: tuple[Share, ...]

    @property
    def store(self) -> Store:
        return self.parts.store

    @property
    def layouts(self) -> list[Layout]:
        """Of every share."""
        return [share.layout for share in self.shares]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return sum(share.layout.nbytes for share in self.shares)

    @property
    def head(self) -> int:
        """The newest step that was saved."""
        return max((state.step for share in self.shares for state in share.states.values()), default=-1)

    def everything(self) -> list[Ids]:
        """Ids of all partitions of every share."""
        return [np.arange(share.layout.partitions, dtype=np.int64) for share in self.shares]


@dataclass(frozen=True, slots=True)
class JointPlan:
    """A plan for each share, None where it has no part in it."""

    joint: Joint
    plans: tuple[Plan | None, ...]
    mode: str
    lost: int
    """Number of partitions that were named as lost."""
    exact: bool
    step: int | None
    """The step of everything restored, None when steps are mixed."""
    degraded: bool
    snapshot: str | None = None
    whole: str = ""
    """The commit of the whole state that all copies to restore are of; see `recovery.Plan`."""

    @property
    def restored(self) -> int:
        """Number of partitions to restore."""
        return sum(len(plan.ids) for _, plan in self.each())

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for _, plan in self.each())

    @property
    def version(self) -> Ids:
        """Of all partitions to restore."""
        return np.concatenate([plan.version for _, plan in self.each()] or [np.empty(0, np.int64)])

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks of which everything is restored."""
        return [
            share.rank
            for share, plan in self.each()
            if share.rank is not None and len(plan.ids) == share.layout.partitions
        ]

    def each(self) -> Iterator[tuple[Share, Plan]]:
        """Shares that have a part in it."""
        for share, plan in zip(self.joint.shares, self.plans, strict=True):
            if plan is not None and len(plan.ids):
                yield share, plan

    def to_json(self) -> dict[str, Any]:
        """The fields of a report; those of `recovery.Plan` first."""
        topology = self.joint.parts.topology
        tiers = [plan.tier for _, plan in self.each()]
        lines = []
        for share, plan in self.each():
            for line in plan.to_json()["shards"]:
                age = max(0, self.joint.head - line["oldest_step"])
                lines.append({**({} if share.rank is None else {"rank": share.rank}), **line, "age": age})
        return {
            "mode": self.mode,
            "exact": self.exact,
            "degraded": self.degraded,
            "step": self.step,
            "snapshot": self.snapshot,
            "lost_partitions": self.lost,
            "restored_partitions": self.restored,
            "bytes": self.nbytes,
            "tiers": count_tiers(np.concatenate(tiers)) if tiers else {},
            "shards": lines,
            "ranks": None if topology is None else {"world": topology.world, "lost": self.lost_ranks},
        }


def open_joint(store: Store, snapshot: Snapshot | None = None) -> Joint | None:
    """The newest whole state of a store that has a topology; None for a store without one.

    Says so when it is not that of the newest topology. Raises NoIntactCopy (kind "nothing-saved") when there is none;
    UsageError, Corruption, Unavailable.
    """
    if not topology_epochs(store):
        return None
    try:
        parts = find_parts(store, snapshot=snapshot)
    except Corruption as error:
        if snapshot is None:
            raise
        raise NoIntactCopy(
            f"snapshot {snapshot.name!r} is damaged: {error.message}",
            hint="nothing was changed; `scarctl verify` lists what is damaged",
            kind="no-sealed-state",
        ) from error
    if parts is None:
        raise NoIntactCopy(
            f"{store.where}: no ranks have saved a whole state in this store yet",
            hint="`scarctl inspect` shows what there is",
            kind="nothing-saved",
        )
    if parts.passed_over:
        log.warning("%s", fallback_note(parts))
    return Joint(parts, tuple(_shares(parts)))


def fallback_note(parts: Parts) -> str:
    """Which newer topologies have no whole state."""
    newest = read_topology(parts.store, parts.passed_over[0])
    older = (
        "one process"
        if parts.topology is None
        else f"the {parts.topology.world} ranks of epoch {parts.topology.epoch}"
    )
    return (
        f"{parts.store.url}: the {newest.world} ranks of epoch {newest.epoch} have not saved a whole state yet: "
        f"this is the state of {older}"
    )


def _shares(parts: Parts) -> Iterator[Share]:
    store = parts.store
    if parts.topology is None:
        layout = next(state.layout for state in parts.states.values() if state.layout is not None)
        yield Share(None, store, layout, store.shard_of(layout), parts.states)
        return
    epoch = 1 + max(state.epoch for state in parts.states.values())
    for rank, shard in enumerate(parts.topology.shards):
        state = parts.states.get(shard)
        if state is not None and state.layout is not None and state.layout.partitions:
            view = store.of_shard(shard, epoch)
            yield Share(rank, view, state.layout, view.shard_of(state.layout), {shard: state})


# -- what was lost -----------------------------------------------------------------------------------------------


def lost_of(spec: Lost, joint: Joint) -> list[Ids]:
    """Ids, ascending, of the partitions of every share that `spec` means.

    spec: "all", ranks ("rank:2", or the number alone), patterns of groups or partitions with rows of whole tensors; or
    several of them, as a list or separated by commas ("rank:1,3").

    Raises UsageError naming what does not exist and what does.
    """
    topology = joint.parts.topology
    if topology is None:
        only = joint.shares[0]
        return [lost_ids(spec, only.layout, only.shard_of, only.store.settings.shards)]
    names = [group.name for layout in joint.layouts for group in layout.groups]
    items = _items(spec, names)
    if not items:
        raise UsageError("nothing is named as lost", hint="give ranks (rank:2), patterns of names, or 'all'")
    lost = [np.zeros(share.layout.partitions, dtype=bool) for share in joint.shares]
    for item in items:
        rank = item.removeprefix(_RANK)
        if item == "all":
            for mask in lost:
                mask[:] = True
        elif rank.isascii() and rank.isdecimal():
            if int(rank) >= topology.world:
                raise UsageError(f"there is no rank {int(rank)}", hint=f"ranks are 0..{topology.world - 1}")
            for share, mask in zip(joint.shares, lost, strict=True):
                mask[:] |= share.rank == int(rank)
        else:
            _add_matching(item, joint, lost, names)
    found = [np.flatnonzero(mask) for mask in lost]
    if not any(ids.size for ids in found):
        raise UsageError("what is named as lost has no partitions", hint="other ranks own what these hold")
    return found


def _items(spec: Lost, names: Iterable[str]) -> list[str]:
    known, items = set(names), []
    for part in [spec] if isinstance(spec, str | int) else spec:
        text = str(part)
        # A comma may belong to a name: the whole text is tried first.
        items += [text] if "," in text and text in known else [piece.strip() for piece in text.split(",")]
    return [item for item in items if item]


def _add_matching(item: str, joint: Joint, lost: Sequence[NDArray[np.bool_]], names: list[str]) -> None:
    errors = []
    for share, mask in zip(joint.shares, lost, strict=True):
        try:
            mask[share.layout.match(item)] = True
        except UsageError as error:
            errors.append(error)
    if len(errors) == len(lost):
        # That of a rank that knows the name says more.
        best = next((e for e in errors if "matches no group" not in e.message), errors[0])
        raise UsageError(
            best.message, hint=best.hint if best is not errors[0] else close_to(item, dict.fromkeys(names))
        )


# -- planning ----------------------------------------------------------------------------------------------------

Arenas: TypeAlias = Sequence[Arena | None]
"""Of every share, None where there is none, or where its copies are lost too."""


def plan_lost(joint: Joint, ids: Sequence[Ids], arenas: Arenas, *, survivors: str = "") -> JointPlan:
    """Take every partition from the freshest intact tier. Raises NoIntactCopy.

    survivors: the commit of the whole state that all is of what is not restored, "" if that is not known.
    """
    plans = [
        plan_partial(mine, share.layout, share.shard_of, share.states, arena) if mine.size else None
        for share, mine, arena in zip(joint.shares, ids, arenas, strict=True)
    ]
    plan = JointPlan(joint, tuple(plans), "partial", sum(len(mine) for mine in ids), False, None, False)
    return settled(plan, survivors)


def settled(plan: JointPlan, survivors: str = "") -> JointPlan:
    """The same with what its plans together say: whether it is exact, of one step, degraded."""
    steps = np.unique(step_of(plan.version))
    step = int(steps[0]) if len(steps) == 1 else None
    degraded = plan.degraded or any(one.degraded for _, one in plan.each())
    whole = plan.restored == sum(share.layout.partitions for share in plan.joint.shares)
    wholes = {one.whole for _, one in plan.each()}
    name = wholes.pop() if len(wholes) == 1 else ""
    exact = bool(name) and step is not None
    if plan.mode != "rollback":
        exact = exact and not degraded and (whole or name == survivors)
    return replace(plan, exact=exact, step=step, degraded=degraded, whole=name)


def sealed_states(joint: Joint) -> list[SealedSet]:
    """The whole states that all shares have sealed, newest first."""
    if joint.parts.topology is None:
        return sealed_sets(joint.parts.states.values())
    return sealed_by_all(joint.parts.states, topology_epochs(joint.store))


def plans_back(joint: Joint, arenas: Arenas, lost: int, snapshot: Snapshot | None) -> Iterator[JointPlan]:
    """Plans that take everything back to a step at which all shares were sealed, newest first; or to the snapshot."""
    passed_over = False
    of = [] if snapshot is None else [SealedSet(snapshot.epoch, snapshot.step, snapshot.seqs, snapshot.whole)]
    for one in of or sealed_states(joint):
        try:
            plans = [
                plan_rollback(
                    share.store,
                    share.layout,
                    share.shard_of,
                    arena,
                    snapshot=Snapshot("", one.epoch, one.step, share.layout.digest, one.seqs, one.whole),
                )
                for share, arena in zip(joint.shares, arenas, strict=True)
            ]
        except NoIntactCopy:
            passed_over = True  # collected long ago, or damaged
            continue
        name = None if snapshot is None else snapshot.name
        plan = JointPlan(joint, tuple(plans), "rollback", lost, True, one.step, passed_over, name)
        yield settled(plan)
        passed_over = True


def no_way_back(snapshot: Snapshot | None, problem: NoIntactCopy | None = None) -> NoIntactCopy:
    """The error when `plans_back` has no more."""
    if snapshot is not None:
        return NoIntactCopy(
            f"snapshot {snapshot.name!r} is damaged{f': {problem.message}' if problem else ''}",
            hint="nothing was changed; `scarctl verify` lists what is damaged",
            kind="no-sealed-state",
        )
    return NoIntactCopy(
        "there is no intact state that every rank sealed at the same step",
        hint="recover the lost partitions only (--mode partial)",
        kind="no-sealed-state",
    )


def extra_seqs(joint: Joint, plan: JointPlan) -> dict[int, int]:
    """Of ranks that own nothing: the sealed record that goes with a rollback, by shard."""
    otherwise, found = alike(topology_epochs(joint.store)), {}
    seqs = {shard: seq for _, one in plan.each() for shard, seq in one.seqs.items()}
    seals = [(shard, seal) for shard, state in joint.parts.states.items() for seal in state.sealed]
    wanted = {seal.whole or otherwise(seal) for shard, seal in seals if seqs.get(shard) == seal.seq}
    for shard, seal in seals:
        if shard not in seqs and (seal.whole or otherwise(seal)) in wanted:
            found[shard] = seal.seq
    return found


def named_snapshot(store: Store, name: str | None) -> Snapshot | None:
    """A snapshot by its name; None for none. Raises UsageError, Corruption."""
    return None if name is None else read_snapshot(store, name)


# -- carrying out ------------------------------------------------------------------------------------------------


class Nowhere:
    """A sink for looking whether everything is intact."""

    arena: Arena | None = None

    def overwrites(self, ids: Ids, versions: Ids) -> bool:
        """No."""
        return False

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Any]) -> None:
        """Forget them."""


@dataclass(frozen=True, slots=True)
class JointReport:
    """A plan that was carried out."""

    plan: JointPlan
    perturbation: Perturbation
    seconds: float
    problems: tuple[str, ...]


def execute_joint(plan: JointPlan, arenas: Arenas, sinks: Sequence[Sink]) -> JointReport:
    """Put every share's partitions into its sink, verified, like `scarctl.execution.execute`.

    sinks: of every share. Raises NoIntactCopy before anything is overwritten in any of them.
    """
    work = [
        (k, share, one, arena, sink)
        for k, (share, one, arena, sink) in enumerate(
            zip(plan.joint.shares, plan.plans, arenas, sinks, strict=True)
        )
        if one is not None and len(one.ids)
    ]
    if len(work) > 1 and any(sink.overwrites(one.ids, one.version) for _, _, one, _, sink in work):
        for _, share, one, arena, _ in work:
            execute(one, share.store, arena, Nowhere())
    reports: dict[int, Report] = {}
    for k, share, one, arena, sink in work:
        reports[k] = execute(one, share.store, arena, sink)
    plans = tuple(reports[k].plan if k in reports else None for k in range(len(plan.plans)))
    done = settled(replace(plan, plans=plans))
    if plan.mode == "partial" and not done.exact:
        done = replace(done, exact=plan.exact and done.whole == plan.whole and not done.degraded)
    problems = [text for report in reports.values() for text in report.problems]
    return JointReport(
        done,
        _together([report.perturbation for report in reports.values()]),
        sum(report.seconds for report in reports.values()),
        tuple(dict.fromkeys(problems)),
    )


def estimated(plan: JointPlan, arenas: Arenas) -> Perturbation:
    """The perturbation as far as it is known before."""
    known = [
        np.full(len(one.ids), np.nan) if arena is None else arena.distance[one.ids]
        for one, arena in zip(plan.plans, arenas, strict=True)
        if one is not None
    ]
    return estimate(np.concatenate(known or [np.empty(0)]))


def _together(each: Sequence[Perturbation]) -> Perturbation:
    values = [one.value for one in each if one.value is not None]
    if len(values) < len(each):
        return Perturbation(None, "unknown")
    norm = math.sqrt(math.fsum(value * value for value in values))
    kinds = {one.kind for one in each}
    if not math.isfinite(norm):
        return Perturbation(None, "unknown")
    return Perturbation(norm, "measured" if kinds <= {"measured"} else "estimated")
