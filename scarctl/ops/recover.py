"""Recover without a running process: into a survivors' state file, a new file, or a stopped run's arenas."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.arena.kinship import believed, open_stopped
from scarctl.arena.queue import HandOverQueue
from scarctl.daemon.client import wait_until_released
from scarctl.errors import Corruption, UsageError
from scarctl.formats.state_file import StateFile, open_state
from scarctl.formats.state_writer import StateWriter, new_state, patch_state
from scarctl.ops.assemble import content, onto, whole_groups
from scarctl.ops.sinks import FileSink, PatchSink, check_fits
from scarctl.recovery.execute import ArenaSink, SealedStateDamaged, Sink
from scarctl.recovery.forecast import Loss, weigh
from scarctl.recovery.plan import Perturbation
from scarctl.recovery.shared_plan import (
    Nowhere,
    SharedPlan,
    estimated,
    execute_shared,
    no_way_back,
    plan_lost,
    plans_back,
)
from scarctl.recovery.shares import Share, SharedState, named_snapshot, open_shares
from scarctl.store import Snapshot, Store, StoreWriter, newest_topology, open_writer
from scarctl.theory.rework import MODES, Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverSettings:
    """What to restore, and into what. Without `into` and `output`: into the stopped run's arena."""

    store: str = field(repr=False)
    """Folder of the store, or an address such as `s3://bucket/folder`."""
    lost: tuple[str, ...]
    """What was lost, as `scarctl.recovery.lost` parses it."""
    mode: str = "partial"
    """"partial"; "rollback": everything, from the newest state of one step; "auto": the one that is predicted to cost
    fewer iterations, partial if there is no prediction."""
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

    plan: SharedPlan
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

    A rollback into a state file or an arena takes the store back too, so that saving can continue from there. One into
    a new file leaves the store alone.

    Raises ScarError (kind "too-much-rework") if the predicted cost exceeds `max_rework` iterations or is unknown.
    Raises UsageError, LayoutMismatch (the file is of another model), NoStore, NoIntactCopy, Contention (the run whose
    arena or store would be written is alive), Corruption, AccessDenied, Unavailable.
    """
    store = Store.open(settings.store, storage_options=settings.storage_options)
    _refuse_inside(store, settings)
    snapshot = named_snapshot(store, settings.snapshot)
    state = open_shares(store, snapshot)
    with ExitStack() as stack:
        return _Recovery(settings, state, snapshot, stack, dry_run=dry_run).run()


def _refuse_inside(store: Store, settings: RecoverSettings) -> None:
    for path in (settings.into, settings.output):
        if path is None or store.address.root is None:
            continue
        # Not Path.resolve(): it raises for links in a circle.
        if Path(os.path.realpath(store.address.root)) in Path(os.path.realpath(path)).parents:
            raise UsageError(f"{path} is inside the store", hint="give a file elsewhere")


class _Recovery:
    """One call of `recover`. `stack` closes what it opens."""

    def __init__(
        self,
        settings: RecoverSettings,
        state: SharedState,
        snapshot: Snapshot | None,
        stack: ExitStack,
        *,
        dry_run: bool,
    ) -> None:
        self.state, self.snapshot, self.dry_run = state, snapshot, dry_run
        self.ids = state.lost(settings.lost)
        self.left_out: frozenset[str] = frozenset()
        path = settings.into or settings.output
        self.output = None if path is None else str(path)
        self.to_arena = path is None
        may_change_store = settings.mode != "partial" and settings.output is None and not dry_run
        if may_change_store:
            self._refuse_older_ranks()
        self.views = self._views()
        if may_change_store or self.to_arena:
            # To be found out before anything is written: whether another process writes.
            for run in dict.fromkeys(view.run_id for view in [state.store, *self.views]):
                wait_until_released(host_folder(settings.arena_dir), run)
            if snapshot is None:
                # Until the run was released, more may have been saved: the way back is chosen by that.
                self.state = state = state.again()
        self.arenas = [stack.enter_context(_stopped_arena(share, settings)) for share in state.shares]
        losses = [
            Loss(share.store, share.states, share.layout, ids, arena, from_arena=not self.to_arena)
            for share, ids, arena in zip(state.shares, self.ids, self.arenas, strict=True)
        ]
        if settings.mode != "rollback":
            # Before the cost is weighed: of what cannot be read it would be an unknown age's.
            for share, ids in zip(state.shares, self.ids, strict=True):
                share.require(ids)
        choice, self.cost = weigh(losses, self._sealed_step(), settings.mode, settings.max_rework)
        self.settings = replace(settings, mode=choice.mode)
        self.writers: list[StoreWriter] = []
        if may_change_store and choice.mode == "rollback":
            for view in self.views:
                self.writers.append(stack.enter_context(self._writer(view)))
        elif self.to_arena and not dry_run:
            stack.callback(state.store.take_lock().release)
        if snapshot is None and (self.to_arena or self.writers):
            # Until locks were taken, more may have been saved.
            self.state = state.again()

    def _refuse_older_ranks(self) -> None:
        """A state of other ranks than those of now cannot become the newest."""
        newest, topology = newest_topology(self.state.store), self.state.topology
        if self.snapshot is None or newest is None:
            return
        if topology is None or topology.shards != newest.shards:
            others = "one process" if topology is None else f"{topology.world} other ranks"
            raise UsageError(
                f"snapshot {self.snapshot.name!r} is of {others}: the store cannot go back to it",
                hint="give --output for a file, or resume the job from it: resume(snapshot=...)",
                kind="snapshot-of-other-ranks",
            )

    def _views(self) -> list[Store]:
        """The store as each writer sees it: those of the shares first, then those of ranks that own nothing."""
        state = self.state
        views = [share.store for share in state.shares]
        if state.topology is not None:
            known = {view.part.shard for view in views if view.part is not None}
            epoch = 1 + max(of.epoch for of in state.states.values())
            views += [
                state.store.of_shard(shard, epoch) for shard in state.topology.shards if shard not in known
            ]
        return views

    def _writer(self, view: Store) -> StoreWriter:
        layout = self.state.shares[0].layout
        if view.part is not None:
            own = self.state.states[view.part.shard].layout
            assert own is not None, "the state is whole"
            layout = own
        return open_writer(view, layout=layout, shard_of=view.shard_of(layout))

    def _sealed_step(self) -> int | None:
        """The step that a rollback would go back to, None if there is none."""
        if self.snapshot is not None:
            return self.snapshot.step
        try:
            return next((sealed.step for sealed in self.state.sealed()), None)
        except Corruption:  # of a shard that has nothing of what is lost, perhaps
            return None

    def run(self) -> Recovery:
        """Plan the recovery and carry it out."""
        file = None if self.settings.into is None else open_state(self.settings.into)
        self._require_arenas()
        problems: tuple[str, ...] = ()
        for plan in self._plans():
            try:
                return self._carry_out(plan, file, problems)
            except SealedStateDamaged as damage:
                problems += (damage.message,)
        raise no_way_back(self.state)

    def _plans(self) -> Iterator[SharedPlan]:
        """Yield plans, best first. The next one is for when a copy of the sealed state is damaged."""
        # What goes into the arenas replaces what lies there: those copies count as lost.
        memory = [None] * len(self.arenas) if self.to_arena else self.arenas
        if self.settings.mode == "rollback":
            yield from plans_back(self.state, memory, sum(len(ids) for ids in self.ids), self.snapshot)
            return
        plan = plan_lost(self.state, self.ids, memory, survivors=self._survivors())
        if self.settings.output is not None:
            # The file has nothing but what is restored.
            plan = replace(plan, exact=bool(plan.whole) and plan.step is not None and not plan.degraded)
        yield plan

    def _require_arenas(self) -> None:
        if not self.to_arena:
            return
        back, here = self.settings.mode == "rollback", any(arena is not None for arena in self.arenas)
        missing = [
            share.rank
            for share, arena, ids in zip(self.state.shares, self.arenas, self.ids, strict=True)
            if arena is None and (len(ids) or back)
        ]
        if not here or (missing and not back):
            ranks = ", ".join(str(rank) for rank in missing if rank is not None)
            raise UsageError(
                f"there is no stopped run's arena {f'of rank {ranks} ' if ranks else ''}on this host",
                hint="give --into a state file, or --output for a new one",
                kind="no-arena",
            )

    def _survivors(self) -> str:
        """The commit of the whole state that what stays in the arenas is of, if all of them are here.

        A state file does not say its own.
        """
        if not self.to_arena:
            return ""
        wholes = {"" if arena is None else arena.whole for arena in self.arenas}
        return wholes.pop() if len(wholes) == 1 else ""

    def _carry_out(self, plan: SharedPlan, file: StateFile | None, problems: tuple[str, ...]) -> Recovery:
        if file is not None:
            touched = {
                share.layout.groups[g].name
                for share, one in plan.each()
                for g in np.unique(share.layout.group_of(one.ids)).tolist()
            }
            wholes = whole_groups(self.state.layouts)
            self.left_out = check_fits((group for name, group in wholes.items() if name in touched), file)
        if self.dry_run:
            known = estimated(plan, self.arenas)
            return Recovery(plan, known, self.output, None, self.cost, problems, self.left_out)
        with self._sinks(plan, file) as (sinks, out):
            report = execute_shared(plan, self.arenas, sinks)
            for arena in self._written():
                arena.name_whole(report.plan.whole if report.plan.exact else "")
            if out is not None:
                out.commit()
        self._roll_back(report.plan)
        return Recovery(
            report.plan,
            report.perturbation,
            self.output,
            report.seconds,
            self.cost,
            problems + report.problems,
            self.left_out,
        )

    def _written(self) -> list[Arena]:
        """The arenas that are restored into."""
        return [arena for arena in self.arenas if arena is not None] if self.to_arena else []

    @contextmanager
    def _sinks(
        self, plan: SharedPlan, file: StateFile | None
    ) -> Iterator[tuple[list[Sink], StateWriter | None]]:
        """Where the partitions of every share go, and the file that is to be committed then."""
        if self.to_arena:
            for arena in self._written():
                # What waits to seal the state is of the copies that are there now.
                HandOverQueue(arena.folder).unseal()
            # Everything is read and verified, also if there is no arena.
            yield [Nowhere() if arena is None else ArenaSink(arena) for arena in self.arenas], None
            return
        layouts = self.state.layouts
        writing: AbstractContextManager[StateWriter]
        if file is not None:
            targets, writing = onto(layouts), patch_state(file)
        else:
            assert self.settings.output is not None
            nothing = np.empty(0, dtype=np.int64)
            specs, targets = content(layouts, [nothing if one is None else one.ids for one in plan.plans])
            writing = new_state(self.settings.output, specs)
        with writing as out:
            pairs = zip(layouts, targets, strict=True)
            if file is not None:
                yield [PatchSink(of, target, out, file, self.left_out) for of, target in pairs], out
            else:
                yield [FileSink(of, target, out) for of, target in pairs], out

    def _roll_back(self, plan: SharedPlan) -> None:
        """Take the store back too, and forget what the stopped run still had of the time after it."""
        if not self.writers:
            return
        seqs = plan.seqs
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


@contextmanager
def _stopped_arena(share: Share, settings: RecoverSettings) -> Iterator[Arena | None]:
    """The arena that a run left on this host, if it is of the share's layout."""
    store = share.store
    if settings.into is None and settings.output is None:
        # It is what will be written: here a live run is an error, and so is a damaged arena.
        folder = arena_folder(settings.arena_dir, store.run_id)
        arena = believed(Arena.open_existing(folder, run_id=store.run_id), store)
    else:
        arena = open_stopped(settings.arena_dir, store)
    try:
        yield arena if arena is not None and arena.layout == share.layout else None
    finally:
        if arena is not None:
            arena.close()
