"""Recover without a running process: into a survivors' state file, a new file, or a stopped run's arenas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.arena.kinship import believed, open_stopped
from scarctl.arena.owner import read_owner
from scarctl.config.checks import check_mode
from scarctl.daemon.client import wait_until_released
from scarctl.errors import Corruption, UsageError
from scarctl.formats.foreign import check_new
from scarctl.formats.state_file import StateFile, open_state
from scarctl.formats.state_writer import StateWriter, new_state, patch_state
from scarctl.ops.assemble import content, onto, whole_groups
from scarctl.ops.sinks import FileSink, PatchSink, check_fits, counting
from scarctl.recovery.execute import SealedStateDamaged, Sink, SlotSink
from scarctl.recovery.forecast import Loss, weigh
from scarctl.recovery.label import label_of
from scarctl.recovery.plan import MEMORY, PEER, Perturbation
from scarctl.recovery.shared_plan import (
    DiscardingSink,
    SharedPlan,
    estimated,
    execute_shared,
    no_way_back,
    plan_lost,
    plans_back,
)
from scarctl.recovery.shares import Share, SharedState, named_snapshot, open_shares
from scarctl.store import Snapshot, Store, StoreWriter, newest_topology, open_writer
from scarctl.theory.rework import Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverSettings:
    """Source and target of a recovery. Without `into` and `output`, the target is the stopped run's arena."""

    store: str = field(repr=False)
    """Folder of the store, or an address such as `s3://bucket/folder`."""
    lost: tuple[str, ...]
    """Names of lost parts, as `scarctl.recovery.lost` parses them."""
    mode: str = "partial"
    """"partial": only lost parts. "rollback": the whole newest state of one step. "auto": the mode with the smaller
    predicted rework; partial without a prediction."""
    into: Path | None = None
    """State file to patch."""
    output: Path | None = None
    """File to write: in torch's format if it ends in .pt or .pth, otherwise (.safetensors, no ending) safetensors."""
    arena_dir: str | None = None
    """Folder of arenas, None for the default."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Options of a remote store's file system. They may be secret."""
    snapshot: str | None = None
    """Snapshot to roll back to, instead of the newest sealed state."""
    max_rework: float | None = None
    """Most predicted rework in iterations; None: no limit."""

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.snapshot is not None and self.mode != "rollback":
            raise UsageError("a snapshot has the whole state: use --mode rollback")
        if self.output is not None:
            check_new(self.output)
        if self.max_rework is not None and not self.max_rework >= 0:
            raise UsageError(f"max_rework is {self.max_rework}, not a number of iterations of at least 0")
        if self.into is not None and self.output is not None:
            raise UsageError(
                "--into and --output exclude each other",
                hint="use --into to patch a file, --output for a new one",
            )


@dataclass(frozen=True, slots=True)
class Recovery:
    """Report of a recovery, or of a dry run."""

    plan: SharedPlan
    perturbation: Perturbation
    output: str | None
    seconds: float | None
    """Duration; None for a dry run."""
    cost: Cost
    """Predicted cost of the recovery."""
    problems: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()
    """Optimizer slots that the patched file does not have."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.plan.to_json(),
            "perturbation": self.perturbation.to_json(),
            **self.cost.to_json(),
            "output": self.output,
            "seconds": self.seconds if self.seconds is None else round(self.seconds, 6),
            "problems": list(self.problems),
        }


def recover(
    settings: RecoverSettings, *, dry_run: bool = False, progress: Callable[[int, int], None] | None = None
) -> Recovery:
    """Restore lost partitions. Nothing is changed unless every one of them has an intact copy.

    progress: called with bytes done and bytes in total.

    A rollback into a state file or an arena rolls the store back too, so that saving can continue from there. A
    rollback into a new file does not change the store.

    Raises ScarError (kind "too-much-rework") if the predicted rework exceeds `max_rework` iterations or is unknown.
    Raises UsageError, LayoutMismatch (the file is of another model), NoStore, NoIntactCopy, Contention (the run is
    alive), Corruption, AccessDenied, Unavailable.
    """
    store = Store.open(settings.store, storage_options=settings.storage_options)
    _refuse_inside(store, settings)
    snapshot = named_snapshot(store, settings.snapshot)
    state = open_shares(store, snapshot)
    with ExitStack() as stack:
        return _Recovery(settings, state, snapshot, stack, progress, dry_run=dry_run).run()


def _refuse_inside(store: Store, settings: RecoverSettings) -> None:
    for path in (settings.into, settings.output):
        if path is None or store.address.root is None:
            continue
        # Path.resolve() would raise for a loop of symbolic links.
        if Path(os.path.realpath(store.address.root)) in Path(os.path.realpath(path)).parents:
            raise UsageError(f"{path} is inside the store", hint="use a file outside the store")


class _Recovery:
    """One call of `recover`. `stack` closes stores and arenas."""

    def __init__(
        self,
        settings: RecoverSettings,
        state: SharedState,
        snapshot: Snapshot | None,
        stack: ExitStack,
        progress: Callable[[int, int], None] | None,
        *,
        dry_run: bool,
    ) -> None:
        self._progress = progress
        self.state, self.snapshot, self.dry_run = state, snapshot, dry_run
        self.ids = state.lost(settings.lost)
        if state.of_members:
            self.state = state = self._of_lost_members(settings)
        self.left_out: frozenset[str] = frozenset()
        path = settings.into or settings.output
        self.output = None if path is None else str(path)
        self.to_arena = path is None
        may_change_store = settings.mode != "partial" and settings.output is None and not dry_run
        if may_change_store:
            self._refuse_older_ranks()
        self.views = self._views()
        if may_change_store or self.to_arena:
            # Locks are taken first: another writer has to be found before anything is written.
            for run in dict.fromkeys(view.run_id for view in [state.store, *self.views]):
                wait_until_released(host_folder(settings.arena_dir), run)
            if snapshot is None:
                # The daemon may have saved more until it released the run, which changes the plan.
                self.state = state = state.again()
        self.arenas = [stack.enter_context(_stopped_arena(share, settings)) for share in state.shares]
        losses = [
            Loss(share.store, share.state, share.layout, ids, arena, from_arena=not self.to_arena)
            for share, ids, arena in zip(state.shares, self.ids, self.arenas, strict=True)
        ]
        if settings.mode != "rollback":
            # Before the cost is weighed: an unreadable copy would have an unknown age.
            for share, ids in zip(state.shares, self.ids, strict=True):
                share.require(ids)
        choice, self.cost = weigh(
            losses, self._sealed_step(), settings.mode, settings.max_rework, apart=state.of_members
        )
        self.settings = replace(settings, mode=choice.mode)
        self.writers: list[StoreWriter] = []
        if may_change_store and choice.mode == "rollback":
            for view in self.views:
                self.writers.append(stack.enter_context(self._writer(view)))
        elif self.to_arena and not dry_run:
            # Other members may run meanwhile, other ranks may not.
            for view in self.views if state.of_members else [state.store]:
                stack.callback(view.take_lock().release)
        if snapshot is None and (self.to_arena or self.writers):
            # Another process may have saved more before the locks were taken.
            self.state = state.again()

    def _of_lost_members(self, settings: RecoverSettings) -> SharedState:
        """Return the state of the lost members. Raises UsageError if they cannot go back together."""
        state, self.ids = self.state.only(self.ids)
        if settings.mode == "rollback" and len(state.shares) > 1:
            raise UsageError(
                f"{len(state.shares)} members have no common step to roll back to",
                hint="roll back one member at a time: --lost member:2 --mode rollback",
                kind="members-apart",
            )
        return state

    def _refuse_older_ranks(self) -> None:
        """Raise UsageError if earlier ranks saved the snapshot: it cannot become the newest state."""
        newest, topology = newest_topology(self.state.store), self.state.topology
        if self.snapshot is None or newest is None:
            return
        if topology is None or topology.shards != newest.shards:
            others = "one process" if topology is None else f"{topology.world} other ranks"
            raise UsageError(
                f"snapshot {self.snapshot.name!r} was saved by {others}: the store cannot be rolled back to it",
                hint="use --output for a file, or resume the job from it: resume(snapshot=...)",
                kind="snapshot-of-other-ranks",
            )

    def _views(self) -> list[Store]:
        """Return the views of all writers: those of the shares first, then those of ranks that own nothing."""
        state = self.state
        views = [share.store for share in state.shares]
        if state.topology is not None and not state.of_members:
            known = {view.part.shard for view in views if view.part is not None}
            views += [state.store.of_shard(shard) for shard in state.topology.shards if shard not in known]
        return views

    def _writer(self, view: Store) -> StoreWriter:
        layout = self.state.shares[0].layout
        if view.part is not None:
            own = self.state.states[view.part.shard].layout
            assert own is not None, "every shard of the state has a layout"
            layout = own
        return open_writer(view, layout=layout)

    def _sealed_step(self) -> int | None:
        """Return the step that a rollback would restore, None without such a state."""
        if self.snapshot is not None:
            return self.snapshot.step
        try:
            return next((sealed.step for sealed in self.state.sealed()), None)
        except Corruption:  # perhaps of a shard without lost partitions
            return None

    def run(self) -> Recovery:
        """Plan the recovery, and carry it out."""
        file = None if self.settings.into is None else open_state(self.settings.into)
        self._require_arenas()
        back = self.settings.mode == "rollback" and self.snapshot is None
        problems = self.state.lost_seals if back else self.state.hidden
        for plan in self._plans():
            try:
                return self._carry_out(plan, file, problems)
            except SealedStateDamaged as damage:
                problems += (damage.message,)
        raise no_way_back(self.state)

    def _plans(self) -> Iterator[SharedPlan]:
        """Yield plans, best first. The next plan is used if a copy of the sealed state is damaged."""
        # The arenas are overwritten, so their own copies count as lost.
        memory = [None] * len(self.arenas) if self.to_arena else self.arenas
        if self.settings.mode == "rollback":
            yield from plans_back(self.state, memory, sum(len(ids) for ids in self.ids), self.snapshot)
            return
        plan = plan_lost(self.state, self.ids, memory, survivors=self._survivors())
        if self.settings.output is not None:
            # The file has only restored partitions.
            plan = replace(plan, label=label_of(plan, of_one=bool(plan.whole) and not plan.degraded))
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
            noun = "rank" if self.state.topology is None else self.state.topology.noun
            raise UsageError(
                f"this host has no arena of {f'stopped {noun} {ranks}' if ranks else 'a stopped run'}",
                hint="use --into to patch a state file, or --output for a new file",
                kind="no-arena",
            )

    def _survivors(self) -> str:
        """Return the name of the commit of the whole state with all copies that stay in the arenas; "" if unknown.

        It is unknown if an arena is on another host, and for a state file.
        """
        if not self.to_arena:
            return ""
        wholes = {"" if arena is None else arena.whole for arena in self.arenas}
        return wholes.pop() if len(wholes) == 1 else ""

    def _carry_out(self, plan: SharedPlan, file: StateFile | None, problems: tuple[str, ...]) -> Recovery:
        if file is not None:
            touched = {
                layout.groups[g].name
                for layout, one in zip(self.state.layouts, plan.plans, strict=True)
                for g in (() if one is None else np.unique(layout.group_of(one.ids)).tolist())
            }
            wholes = whole_groups(self.state.layouts)
            self.left_out = check_fits((group for name, group in wholes.items() if name in touched), file)
        if self.dry_run:
            known = estimated(plan, self.arenas)
            shown = self._named(plan)
            problems += tuple(reason for _, one in plan.each() for reason in one.doubts)
            return Recovery(shown, known, self.output, None, self.cost, problems, self.left_out)
        with self._sinks(plan, file) as (sinks, out):
            report = execute_shared(plan, self.arenas, counting(sinks, plan.nbytes, self._progress))
            whole = report.plan.whole if report.plan.label.of_one else ""
            for sink, one in zip(sinks, report.plan.plans, strict=True):
                if isinstance(sink, SlotSink) and one is not None:
                    sink.settle(one, whole)
            for arena in self._written():
                arena.slot.name(whole)
            if out is not None:
                out.commit()
        self._roll_back(report.plan)
        return Recovery(
            self._named(report.plan),
            report.perturbation,
            self.output,
            report.seconds,
            self.cost,
            problems + report.problems,
            self.left_out,
        )

    def _named(self, plan: SharedPlan) -> SharedPlan:
        """Return a plan for display, in which copies from replicas of other hosts' memory have the tier "peer"."""
        plans = list(plan.plans)
        for k, (one, arena) in enumerate(zip(plans, self.arenas, strict=True)):
            if one is not None and arena is not None and read_owner(arena.folder) is not None:
                plans[k] = replace(one, tier=np.where(one.tier == MEMORY, np.int8(PEER), one.tier))
        return replace(plan, plans=tuple(plans))

    def _written(self) -> list[Arena]:
        """Return the arenas that are the recovery's target."""
        return [arena for arena in self.arenas if arena is not None] if self.to_arena else []

    @contextmanager
    def _sinks(
        self, plan: SharedPlan, file: StateFile | None
    ) -> Iterator[tuple[list[Sink], StateWriter | None]]:
        """Yield the sinks of all shares, and the file to commit after them."""
        if self.to_arena:
            # All copies are read and verified, even without an arena to write to.
            yield [DiscardingSink() if arena is None else SlotSink(arena) for arena in self.arenas], None
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
        """Roll the store back too, and discard newer copies of the stopped run."""
        if not self.writers:
            return
        for writer, arena in zip(self.writers, self.arenas, strict=False):
            writer.accompany(arena)
        for writer in self.writers:
            if writer.shard in plan.seqs:
                writer.roll_back(plan.seqs[writer.shard])
        for arena in self._written():
            arena.mark_all_durable()
        if self.settings.into is not None:
            for arena in self.arenas:
                if arena is not None:
                    arena.remove()


@contextmanager
def _stopped_arena(share: Share, settings: RecoverSettings) -> Iterator[Arena | None]:
    """Yield the arena of a stopped run on this host, if it has the share's layout, otherwise None."""
    store = share.store
    if settings.into is None and settings.output is None:
        # The arena will be written, so a live run or a damaged arena is an error.
        folder = arena_folder(settings.arena_dir, store.run_id)
        arena = believed(Arena.open_existing(folder, run_id=store.run_id), store)
    else:
        arena = open_stopped(settings.arena_dir, store)
    try:
        yield arena if arena is not None and arena.layout == share.layout else None
    finally:
        if arena is not None:
            arena.close()
