"""Recovery without a running process: into a survivors' state file, a new file, or a stopped run's arena."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.daemon.client import wait_until_released
from scarctl.daemon.folder import arena_folder, host_folder
from scarctl.daemon.handover import HandOverQueue
from scarctl.daemon.kinship import believed, open_stopped
from scarctl.errors import Corruption, NoIntactCopy, UsageError
from scarctl.execution import Report, Sink, execute
from scarctl.joint import (
    Arenas,
    Joint,
    JointPlan,
    Nowhere,
    estimated,
    execute_joint,
    extra_seqs,
    lost_of,
    named_snapshot,
    no_way_back,
    open_joint,
    plan_lost,
    plans_back,
    sealed_states,
)
from scarctl.layout import Layout
from scarctl.outlook import Loss, weigh
from scarctl.prediction import MODES, Cost
from scarctl.recovery import Ids, Perturbation, Plan, estimate, lost_ids, plan_partial, plan_rollback
from scarctl.sinks import ArenaSink, FileSink, PatchSink, check_fits, file_content
from scarctl.statefile import StateFile, open_state
from scarctl.statewriter import StateWriter, new_state, patch_state
from scarctl.store import (
    SealedSet,
    ShardState,
    Snapshot,
    Store,
    StoreWriter,
    backed_shards,
    newest_topology,
    read_snapshot,
    sealed_sets,
)
from scarctl.whole import BoxSink, PatchBoxSink, content, onto, whole_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverSettings:
    """What to restore, and into what. Without `into` and `output`: into the stopped run's arena."""

    store: str = field(repr=False)
    """Folder of the store, or an address such as `s3://bucket/folder`."""
    lost: tuple[str, ...]
    """What was lost: "all", shard numbers, ranks ("rank:2") where several have saved, patterns of names; each may be
    several, separated by commas."""
    mode: str = "partial"
    """"partial"; "rollback": everything, from the newest state of one step; "auto": what is predicted to cost fewer
    iterations, partial where that cannot be told."""
    into: Path | None = None
    """State file that is patched."""
    output: Path | None = None
    """File that is written, torch's format when it ends in .pt or .pth, else safetensors."""
    arena_dir: str | None = None
    """Folder of arenas, if not the default."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """For the file system of a remote store. They may be secret."""
    snapshot: str | None = None
    """Rollback: to this snapshot, not to the newest sealed state."""
    max_rework: float | None = None
    """Iterations that the recovery may cost; None: any number."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"unknown mode {self.mode!r}", hint=f"use one of {', '.join(MODES)}")
        if self.snapshot is not None and self.mode != "rollback":
            raise UsageError("a snapshot is whole: it goes with --mode rollback")
        if self.max_rework is not None and not self.max_rework >= 0:
            raise UsageError(f"max_rework is {self.max_rework}, not a number of iterations from 0 on")
        if self.into is not None and self.output is not None:
            raise UsageError(
                "both --into and --output are given", hint="give one: patch a file, or write a new one"
            )


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was done, or with a dry run would be done."""

    plan: Plan | JointPlan
    perturbation: Perturbation
    output: str | None
    seconds: float | None
    """None for a dry run."""
    cost: Cost
    """As it was predicted."""
    problems: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()
    """Optimizer slots that the patched file does not hold."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.plan.to_json(),
            "perturbation": self.perturbation.to_json(),
            **self.cost.to_json(),
            "output": self.output,
            "seconds": self.seconds if self.seconds is None else round(self.seconds, 6),
            "problems": list(self.problems),
        }


def recover(settings: RecoverSettings, *, dry_run: bool = False) -> Recovery:
    """Restore lost partitions. Nothing is changed unless every one of them has an intact copy.

    A rollback into a state file or an arena takes the store back too, so that saving can go on from there; one into
    a new file leaves the store alone.

    Raises ScarError (kind "too-much-rework") when it may cost more than `max_rework` iterations, or nobody can tell.
    Raises UsageError, LayoutMismatch (the file is of another model), NoStore, NoIntactCopy, Contention (the run whose
    arena or store would be written is alive), Corruption, AccessDenied, Unavailable.
    """
    store = Store.open(settings.store, storage_options=settings.storage_options)
    _refuse_inside(store, settings)
    joint = open_joint(store, named_snapshot(store, settings.snapshot))
    if joint is not None:
        with ExitStack() as stack:
            return _RanksRecovery(settings, joint, stack, dry_run=dry_run).run()
    layout = store.current_layout()
    if layout is None:
        raise NoIntactCopy(
            f"{store.where}: nothing is saved in this store yet",
            hint="save a checkpoint first",
            kind="nothing-saved",
        )
    shard_of = backed_shards(store, layout)
    ids = lost_ids(settings.lost, layout, shard_of, store.settings.shards)
    # To be found out before anything is written: whether somebody else writes.
    may_change_store = settings.mode != "partial" and settings.output is None and not dry_run
    changes_arena = settings.into is None and settings.output is None
    if may_change_store or changes_arena:
        wait_until_released(host_folder(settings.arena_dir), store.run_id)
    with ExitStack() as stack:
        arena = stack.enter_context(_stopped_arena(store, layout, settings))
        states, sealed = _states(store, layout, shard_of, ids)
        snapshot = named_snapshot(store, settings.snapshot)
        loss = Loss(store, states, layout, ids, arena, from_arena=not changes_arena)
        choice, cost = weigh([loss], _sealed_step(snapshot or sealed), settings.mode, settings.max_rework)
        settings = replace(settings, mode=choice.mode)
        writer: StoreWriter | None = None
        if may_change_store and settings.mode == "rollback":
            writer = stack.enter_context(store.writer(layout=layout, shard_of=shard_of))
        elif changes_arena and not dry_run:
            stack.callback(store.take_lock().release)
        return _Recovery(settings, store, layout, shard_of, ids, arena, cost).run(writer, dry_run=dry_run)


def _states(
    store: Store, layout: Layout, shard_of: NDArray[np.int32], ids: Ids
) -> tuple[dict[int, ShardState], SealedSet | None]:
    """States of all shards, and what they were sealed at together.

    Where another shard than those of `ids` is damaged, only theirs: they can be restored all the same.
    """
    try:
        states = store.states(np.unique(shard_of).tolist(), layout)
    except Corruption:
        return store.states(np.unique(shard_of[ids]).tolist(), layout), None
    return states, next(iter(sealed_sets(states.values())), None)


def _sealed_step(sealed: Snapshot | SealedSet | None) -> int | None:
    return None if sealed is None else sealed.step


def _refuse_inside(store: Store, settings: RecoverSettings) -> None:
    for path in (settings.into, settings.output):
        if path is None or store.address.root is None:
            continue
        # Not Path.resolve(): it raises for links in a circle.
        if Path(os.path.realpath(store.address.root)) in Path(os.path.realpath(path)).parents:
            raise UsageError(f"{path} is inside the store", hint="give a file elsewhere")


class _Recovery:
    """One call of `recover`, with everything opened."""

    def __init__(
        self,
        settings: RecoverSettings,
        store: Store,
        layout: Layout,
        shard_of: NDArray[np.int32],
        ids: Ids,
        arena: Arena | None,
        cost: Cost,
    ) -> None:
        self.settings = settings
        self.store = store
        self.layout = layout
        self.shard_of = shard_of
        self.ids = ids
        self.arena = arena
        self.cost = cost
        self.left_out: frozenset[str] = frozenset()

    def run(self, writer: StoreWriter | None, *, dry_run: bool) -> Recovery:
        state = None if self.settings.into is None else open_state(self.settings.into)
        if state is None and self.settings.output is None and self.arena is None:
            raise UsageError(
                "there is no stopped run's arena on this host",
                hint="give --into a state file, or --output for a new one",
                kind="no-arena",
            )
        plan = self._plan()
        if state is not None:
            self.left_out = check_fits(self.layout, plan.ids, state)
        if dry_run:
            known = np.full(len(plan.ids), np.nan) if self.arena is None else self.arena.distance[plan.ids]
            return Recovery(plan, estimate(known), self._output(), None, self.cost, left_out=self.left_out)
        report = self._into(plan, state) if state is not None else self._elsewhere(plan)
        if writer is not None:
            writer.accompany(self.arena)
            writer.roll_back(report.plan.seqs)
            self._forget()
        return Recovery(
            report.plan,
            report.perturbation,
            self._output(),
            report.seconds,
            self.cost,
            report.problems,
            self.left_out,
        )

    def _plan(self) -> Plan:
        # What goes into the arena replaces what lies there: those copies count as lost.
        memory = None if self.settings.into is None and self.settings.output is None else self.arena
        if self.settings.mode == "rollback":
            name = self.settings.snapshot
            return plan_rollback(
                self.store,
                self.layout,
                self.shard_of,
                memory,
                lost=len(self.ids),
                snapshot=None if name is None else read_snapshot(self.store, name),
            )
        shards = np.unique(self.shard_of[self.ids]).tolist()
        states = self.store.states(shards, self.layout)
        plan = plan_partial(self.ids, self.layout, self.shard_of, states, memory, survivors=self._survivors())
        if self.settings.output is not None:
            # The file has nothing but what is restored.
            plan = replace(plan, exact=bool(plan.whole) and plan.step is not None and not plan.degraded)
        return plan

    def _survivors(self) -> str:
        """The commit of the whole state that what stays in the arena is of. A state file does not say its own."""
        if self.arena is None or self.settings.into is not None or self.settings.output is not None:
            return ""
        return self.arena.whole

    def _into(self, plan: Plan, state: StateFile) -> Report:
        with patch_state(state) as out:
            report = self._execute(plan, PatchSink(self.layout, plan.ids, state, out))
            out.commit()
        return report

    def _elsewhere(self, plan: Plan) -> Report:
        if self.settings.output is None:
            assert self.arena is not None
            # What waits to seal the state is of the copies that are there now.
            HandOverQueue(self.arena.folder).unseal()
            report = self._execute(plan, ArenaSink(self.arena))
            self.arena.whole = report.plan.whole if report.exact else ""
            return report
        specs, runs = file_content(self.layout, plan.ids)
        with new_state(self.settings.output, specs) as out:
            report = self._execute(plan, FileSink(self.layout, out, runs))
            out.commit()
        return report

    def _execute(self, plan: Plan, sink: Sink) -> Report:
        return execute(plan, self.store, self.arena, sink)

    def _forget(self) -> None:
        """After a rollback of the store: what the stopped run still had of the time after it must not come back."""
        if self.arena is None:
            return
        HandOverQueue(self.arena.folder).clear()
        if self.settings.into is not None:
            self.arena.remove()

    def _output(self) -> str | None:
        path = self.settings.into or self.settings.output
        return None if path is None else str(path)


class _RanksRecovery:
    """The same for a store of several ranks. What it opens is closed with `stack`."""

    def __init__(self, settings: RecoverSettings, joint: Joint, stack: ExitStack, *, dry_run: bool) -> None:
        self.joint, self.dry_run = joint, dry_run
        self.ids = lost_of(settings.lost, joint)
        self.left_out: frozenset[str] = frozenset()
        self.to_arena = settings.into is None and settings.output is None
        may_change_store = settings.mode != "partial" and settings.output is None and not dry_run
        if may_change_store:
            self._refuse_older_ranks(settings.snapshot)
        topology, store = joint.parts.topology, joint.store
        self.views = [share.store for share in joint.shares]
        if topology is not None:
            known = {view.part.shard for view in self.views if view.part is not None}
            epoch = 1 + max(state.epoch for state in joint.parts.states.values())
            # Those that own nothing have a log all the same.
            self.views += [store.of_shard(shard, epoch) for shard in topology.shards if shard not in known]
        if may_change_store or self.to_arena:
            for view in [store, *self.views]:
                wait_until_released(host_folder(settings.arena_dir), view.run_id)
        self.arenas = [
            stack.enter_context(_stopped_arena(share.store, share.layout, settings)) for share in joint.shares
        ]
        losses = [
            Loss(share.store, share.states, share.layout, ids, arena, from_arena=not self.to_arena)
            for share, ids, arena in zip(joint.shares, self.ids, self.arenas, strict=True)
        ]
        sealed = named_snapshot(store, settings.snapshot) or next(iter(sealed_states(joint)), None)
        choice, self.cost = weigh(losses, _sealed_step(sealed), settings.mode, settings.max_rework)
        self.settings = replace(settings, mode=choice.mode)
        self.writers: list[StoreWriter] = []
        if may_change_store and choice.mode == "rollback":
            for view in self.views:
                state = joint.parts.states[view.part.shard] if view.part is not None else None
                layout = joint.shares[0].layout if state is None else state.layout
                assert layout is not None, "the state is whole"
                writer = view.writer(layout=layout, shard_of=view.shard_of(layout))
                self.writers.append(stack.enter_context(writer))
        elif self.to_arena and not dry_run:
            stack.callback(store.take_lock().release)

    def _refuse_older_ranks(self, snapshot: str | None) -> None:
        """A state of other ranks than those of now cannot become the newest."""
        newest, topology = newest_topology(self.joint.store), self.joint.parts.topology
        if snapshot is None or newest is None:
            return
        if topology is None or topology.shards != newest.shards:
            others = "one process" if topology is None else f"{topology.world} other ranks"
            raise UsageError(
                f"snapshot {snapshot!r} is of {others}: the store cannot go back to it",
                hint="give --output for a file, or resume the job from it: resume(snapshot=...)",
                kind="snapshot-of-other-ranks",
            )

    def run(self) -> Recovery:
        """Plan it and carry it out."""
        self._require_arenas()
        # What goes into the arenas replaces what lies there: those copies count as lost.
        memory = [None] * len(self.arenas) if self.to_arena else self.arenas
        snapshot = named_snapshot(self.joint.store, self.settings.snapshot)
        plans: Iterable[JointPlan]
        if self.settings.mode == "rollback":
            plans = plans_back(self.joint, memory, sum(len(ids) for ids in self.ids), snapshot)
        else:
            plan = plan_lost(self.joint, self.ids, memory, survivors=self._survivors())
            if self.settings.output is not None:
                # The file has nothing but what is restored.
                plan = replace(plan, exact=bool(plan.whole) and plan.step is not None and not plan.degraded)
            plans = [plan]
        problem: NoIntactCopy | None = None
        for plan in plans:
            try:
                return self._carry_out(plan, memory, () if problem is None else (problem.message,))
            except NoIntactCopy as error:
                if error.kind != "no-sealed-state":
                    raise
                problem = error
        raise no_way_back(snapshot, problem)

    def _require_arenas(self) -> None:
        if not self.to_arena or (
            any(arena is not None for arena in self.arenas) and self.settings.mode == "rollback"
        ):
            return
        missing = [
            str(share.rank or 0)
            for share, arena, ids in zip(self.joint.shares, self.arenas, self.ids, strict=True)
            if arena is None and (len(ids) or self.settings.mode == "rollback")
        ]
        if missing:
            raise UsageError(
                f"there is no stopped run's arena of rank {', '.join(missing)} on this host",
                hint="give --into a state file, or --output for a new one",
                kind="no-arena",
            )

    def _survivors(self) -> str:
        """The commit of the whole state that what stays in the arenas is of, when all of them are here."""
        if not self.to_arena:
            return ""
        wholes = {"" if arena is None else arena.whole for arena in self.arenas}
        return wholes.pop() if len(wholes) == 1 else ""

    def _carry_out(self, plan: JointPlan, memory: Arenas, problems: tuple[str, ...]) -> Recovery:
        state = None if self.settings.into is None else open_state(self.settings.into)
        if state is not None:
            numbers = (
                (share, np.unique(one.layout.group_of(one.ids)).tolist()) for share, one in plan.each()
            )
            touched = {share.layout.groups[g].name for share, groups in numbers for g in groups}
            wholes = [group for name, group in whole_groups(self.joint.layouts).items() if name in touched]
            whole = Layout(wholes)
            self.left_out = check_fits(whole, np.arange(whole.partitions), state)
        if self.dry_run:
            known = estimated(plan, self.arenas)
            return Recovery(plan, known, self._output(), None, self.cost, problems, self.left_out)
        with self._sinks(plan, state) as (sinks, out):
            report = execute_joint(plan, memory, sinks)
            for arena in self.arenas if self.to_arena else ():
                if arena is not None:
                    arena.whole = report.plan.whole if report.plan.exact else ""
            if out is not None:
                out.commit()
        self._roll_back(report.plan)
        problems += report.problems
        return Recovery(
            report.plan,
            report.perturbation,
            self._output(),
            report.seconds,
            self.cost,
            problems,
            self.left_out,
        )

    @contextmanager
    def _sinks(
        self, plan: JointPlan, state: StateFile | None
    ) -> Iterator[tuple[list[Sink], StateWriter | None]]:
        layouts = self.joint.layouts
        if self.to_arena:
            for arena in self.arenas:
                if arena is not None:
                    HandOverQueue(arena.folder).unseal()
            # Where there is no arena everything is looked at all the same.
            yield [Nowhere() if arena is None else ArenaSink(arena) for arena in self.arenas], None
            return
        writing: AbstractContextManager[StateWriter]
        if state is not None:
            targets, writing = onto(layouts), patch_state(state)
        else:
            assert self.settings.output is not None
            none = np.empty(0, dtype=np.int64)
            specs, targets = content(layouts, [none if one is None else one.ids for one in plan.plans])
            writing = new_state(self.settings.output, specs)
        with writing as out:
            pairs = zip(layouts, targets, strict=True)
            if state is not None:
                yield [PatchBoxSink(of, target, out, state, self.left_out) for of, target in pairs], out
            else:
                yield [BoxSink(of, target, out) for of, target in pairs], out

    def _roll_back(self, plan: JointPlan) -> None:
        """Takes the store back too, and forgets what the stopped run still had of the time after it."""
        if not self.writers:
            return
        seqs = {shard: seq for _, one in plan.each() for shard, seq in one.seqs.items()}
        seqs |= extra_seqs(self.joint, plan)
        for writer, arena in zip(self.writers, self.arenas, strict=False):
            writer.accompany(arena)
        for writer in self.writers:
            mine = {shard: seq for shard, seq in seqs.items() if shard in writer.states}
            if mine:
                writer.roll_back(mine)
        for view in self.views:
            folder = arena_folder(self.settings.arena_dir, view.run_id)
            if folder.exists():
                HandOverQueue(folder).clear()
        if self.settings.into is not None:
            for arena in self.arenas:
                if arena is not None:
                    arena.remove()

    def _output(self) -> str | None:
        path = self.settings.into or self.settings.output
        return None if path is None else str(path)


@contextmanager
def _stopped_arena(store: Store, layout: Layout, settings: RecoverSettings) -> Iterator[Arena | None]:
    """The arena that a run of this store left on this host, if it is of the store's layout."""
    if settings.into is None and settings.output is None:
        # It is what will be written: here a live run is an error, and so is a damaged arena.
        folder = arena_folder(settings.arena_dir, store.run_id)
        arena = believed(Arena.open_existing(folder, run_id=store.run_id), store)
    else:
        arena = open_stopped(settings.arena_dir, store)
    try:
        yield arena if arena is not None and arena.layout == layout else None
    finally:
        if arena is not None:
            arena.close()
