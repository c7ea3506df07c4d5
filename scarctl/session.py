"""The Python API: `attach` puts scarctl beside a training loop, the `Session` it returns saves, resumes and recovers.

What a session does with the training thread's time: after the last optimizer's step it reads the extras that the next
batch will change, clones the buffers that the next forward will change, and starts the copy on a worker thread. Before
the next optimizer step it waits for what of the copy is not finished, reads the remaining extras, and queues the
checkpoint.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch

from scarctl.adapter import Adapter, StateGroup, find_adapter
from scarctl.config import SessionSettings
from scarctl.daemon.client import DaemonSaver
from scarctl.daemon.folder import arena_folder
from scarctl.daemon.saver import LocalSaver, Saver
from scarctl.dtypes import name_of, plain
from scarctl.engine import Copied, Engine
from scarctl.errors import Corruption, LayoutMismatch, ScarError, UsageError
from scarctl.layout import Group, Layout, TensorSpec, build_layout
from scarctl.live import LiveState
from scarctl.recovery import Report
from scarctl.restore import Resumed, recover_live, resume_live
from scarctl.store import Store
from scarctl.version import MAX_STEP
from scarctl.worker import Job, Worker

log = logging.getLogger("scarctl")


@dataclass(slots=True)
class Stats:
    """What a session has done so far."""

    checkpoints: int = 0
    stall_seconds: float = 0.0
    """Time of the training thread in hooks and waiting, all together."""
    last_stall_seconds: float = 0.0
    """The part of it that the newest checkpoint took."""
    saved_bytes: int = 0
    """Bytes copied into the arena."""
    nonfinite_partitions: int = 0
    """Partitions that some checkpoint left out because their values were not finite."""
    torn_copies: int = 0
    """Groups copied again because they changed while they were copied."""
    errors: int = 0
    last_error: str = ""


@dataclass(slots=True)
class _UnderWay:
    """A checkpoint between its two halves."""

    step: int
    job: Job[Copied]
    live: LiveState
    counters: list[list[int]]
    early: Any
    snapshot: list[list[torch.Tensor]] | None


def attach(
    model: Any,
    optimizer: Any = None,
    *,
    store: str | os.PathLike[str] | None = None,
    fraction: float | None = None,
    interval: int | None = None,
    policy: str | None = None,
    norm: str | Callable[..., Any] | None = None,
    max_staleness: int | None = None,
    shards: int | None = None,
    seed: int | None = None,
    partition_bytes: int | None = None,
    by_layer: bool | None = None,
    rows: Mapping[str, int] | None = None,
    schedulers: Any = (),
    scaler: Any = None,
    extras: Mapping[str, Any] | None = None,
    auto: bool = True,
    on_error: str | None = None,
    arena_dir: str | os.PathLike[str] | None = None,
    validate: bool | None = None,
    drain_timeout: float | None = None,
) -> Session:
    """Checkpoint `model` and its optimizer from now on; returns the `Session`.

    model: an `nn.Module`, or a dict of numpy arrays.
    optimizer: a `torch.optim.Optimizer`, or several in the order in which they step: the last one ends an iteration.
    store: folder of the store, made if it is not there. SCARCTL_STORE and `scarctl.toml` may name it instead.
    fraction: share of the state's bytes that one partial checkpoint may write (the paper's r).
    interval: iterations between two partial checkpoints (the paper's rC).
    policy: "priority", "round", "random" or "full".
    norm: "l2", "rms", "relative", or a function (see `scarctl.distance`).
    max_staleness: iterations after which a changed partition is saved before all others.
    shards, seed: split the state at random into that many parts that fail together.
    partition_bytes, by_layer, rows: size of a partition; fixed, like shards and seed, when the store is created.
    schedulers, scaler: learning-rate schedulers and gradient scaler; read right before the next step.
    extras: more objects with a state (state_dict(), a dict, a numpy Generator); read right after a step.
    auto: hook into the optimizers' steps; otherwise call `session.step()` at the end of every iteration.
    on_error: "warn" logs and counts a fault while saving, "raise" raises it from the training loop.
    arena_dir: folder for the arena instead of shared memory.
    validate: prove after every copy that it is not torn, at the price of cloning the state.
    drain_timeout: seconds that `close` waits for the store.

    Raises UsageError (arguments), NoStore (`kind` "foreign-store"), SettingsConflict, Contention, AccessDenied,
    Unavailable. From the first step on, saving raises nothing unless `on_error="raise"`.
    """
    given = {
        "store": os.fspath(store) if store is not None else None,
        "fraction": fraction,
        "interval": interval,
        "policy": policy,
        "norm": norm,
        "max_staleness": max_staleness,
        "shards": shards,
        "seed": seed,
        "partition_bytes": partition_bytes,
        "by_layer": by_layer,
        "rows": rows,
        "on_error": on_error,
        "arena_dir": os.fspath(arena_dir) if arena_dir is not None else None,
        "validate": validate,
        "drain_timeout": drain_timeout,
    }
    settings = SessionSettings.resolve(given, environ=os.environ)
    adapter = find_adapter(
        model, _as_list(optimizer), schedulers=_as_list(schedulers), scaler=scaler, extras=extras
    )
    return Session(adapter, settings, auto=auto and adapter.automatic)


class Session:
    """One training process's checkpoints. Made by `attach`; `close` it, or use it in a `with` statement."""

    def __init__(self, adapter: Adapter, settings: SessionSettings, *, auto: bool) -> None:
        self.settings = settings
        self.stats = Stats()
        self.head_step = 0
        """Iterations finished so far, counted over restarts."""
        self._adapter = adapter
        self._engine: Engine | None = None
        self._under_way: _UnderWay | None = None
        self._in_step = False
        self._closed = False
        self._pid = os.getpid()
        self._requested: bool | None = None
        self._views: LiveState | None = None  # mapping the arena takes longer than the rest of a hook
        self.store = Store.create(settings.store, **settings.fixed())
        self._saver = self._make_saver()
        try:
            self._saver.claim()
            self._remove_hooks = (
                adapter.install(self._before_step, self._after_step) if auto else lambda: None
            )
        except BaseException:
            self._saver.close()
            self.store.close()
            raise
        self._worker = Worker("scarctl-copy")
        # Without this, a loop that just ends would lose what it did since the last checkpoint.
        atexit.register(self.close)

    # -- the loop -----------------------------------------------------------------------------------------------

    def step(self, step: int | None = None) -> None:
        """Say that an iteration is over, where no hook says it. `step`: its number, if the loop counts itself.

        Raises UsageError when `step` goes backwards or is negative.
        """
        self._check_open()
        if step is not None:
            _check_step(step, self.head_step)
            self.head_step = step - 1
        self._before_step()
        self._after_step()
        self._finish()

    def checkpoint(self, *, full: bool = False, wait: bool = False) -> None:
        """Save now: one partial checkpoint, or the whole state as a sealed one. `wait`: until it is durable.

        Raises UsageError before the first step, when the optimizer has no state yet, and with `wait` the store's fault.
        """
        engine = self._started()
        self._finish()
        self._begin(full=full)
        self._finish()
        if wait and not engine.saver.drain(self.settings.drain_timeout):
            raise engine.saver.fault()

    def resume(self, mode: str = "partial") -> Resumed:
        """Restore what the store and this host's memory have, in place; an empty store changes nothing.

        mode: "partial" takes every partition's newest copy; "rollback" the newest state that is of one step everywhere.
        Returns the step to go on after, whether the state is exact, and the report.
        Raises LayoutMismatch (another model or optimizer), NoIntactCopy, Corruption; then nothing was changed.
        """
        self._check_open()
        if self._engine is not None:
            raise UsageError(
                "resume() comes before the first step", hint="use session.recover() in a running loop"
            )
        layout = self.store.current_layout()
        if layout is None:
            return Resumed(step=0, exact=True, report=None)
        self._check_model(layout)
        remove_slots = self._adapter.create_slots(layout)
        try:
            engine = self._start(layout)
            resumed, extras = resume_live(engine, self._live(engine), mode)
        except BaseException:
            remove_slots()
            raise
        if extras is None:
            remove_slots()
        else:
            self._adapter.restore(extras["early"], extras["late"])
            engine.credit, engine.cursor = extras["policy"]["credit"], extras["policy"]["cursor"]
        self.head_step = resumed.step
        engine.arena.head_step = resumed.step
        return resumed

    def recover(self, lost: str | int | Iterable[str | int], mode: str = "partial") -> Report:
        """Restore lost partitions in the running process, in place; the others keep their progress.

        lost: shard numbers, patterns of group names ("layers.3.*", "emb.weight[0:512]"), or "all".
        mode: "partial", or "rollback" to the newest sealed state (everything, with its extras).
        Raises UsageError for a part that does not exist, NoIntactCopy when one has no copy; then nothing was changed.
        """
        engine = self._started()
        self._finish()
        report, extras = recover_live(engine, self._live(engine), lost, mode, self.head_step)
        if extras is not None:
            self._adapter.restore(extras["early"], extras["late"])
        if report.mode == "rollback" and report.step is not None:
            self.head_step = report.step
            engine.arena.head_step = report.step
        return report

    def close(self, *, seal: bool = True) -> None:
        """Save the whole state as a sealed checkpoint, wait up to `drain_timeout` seconds for the store, and let go.

        What is not durable by then stays in the arena, and the next session on this host goes on with it.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._remove_hooks()
        try:
            if self._engine is not None:
                self._close_engine(self._engine, seal=seal)
            else:
                self._saver.close()
        finally:
            self._worker.close()
            self.store.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- hooks --------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        """Right before an optimizer changes parameters: the copy under way has to be finished."""
        if self._inert():
            return
        self._in_step = True
        if self._under_way is not None:
            self._finish()
        elif self._engine is None and self.head_step == 0:
            self._refuse_unread_store()

    def _after_step(self) -> None:
        """Right after the last optimizer's step: an iteration is over."""
        if self._inert():
            return
        self._in_step = False
        self.head_step += 1
        if self._engine is None:
            self._start(self._build_layout())
            self._begin(full=True)
            return
        self._engine.arena.head_step = self.head_step
        requested, self._requested = self._requested, None
        if requested is not None:
            self._begin(full=requested)
        elif self.head_step % self.settings.interval == 0:
            full = self.settings.policy == "full"
            self._begin(full=full, skip_if_behind=full)

    def _inert(self) -> bool:
        """A closed session, or a forked child's copy of one (a data loader's worker) does nothing."""
        return self._closed or os.getpid() != self._pid

    # -- one checkpoint -----------------------------------------------------------------------------------------

    def _begin(self, *, full: bool, skip_if_behind: bool = False) -> None:
        """First half: read what the next batch changes, start the copy."""
        engine = self._started()
        started = time.perf_counter()
        try:
            if (fault := engine.saver.failure) is not None:
                raise fault
            live = self._live(engine)
            # A forward pass changes buffers (batch norm): the copy must not read them while it does.
            buffers = [g for g, group in enumerate(engine.layout.groups) if group.kind == "buffer"]
            live = live.with_tensors({g: [t.clone() for t in live.tensors[g]] for g in buffers})
            step = self.head_step

            def copy() -> Copied:
                return (
                    engine.seal(live, step, skip_if_behind=skip_if_behind)
                    if full
                    else engine.copy(live, step)
                )

            self._under_way = _UnderWay(
                step=step,
                job=self._worker.submit(copy),
                live=live,
                counters=_counters(live),
                early=plain(self._adapter.capture_early()),
                snapshot=[[t.clone() for t in group] for group in live.tensors]
                if self.settings.validate
                else None,
            )
        except Exception as error:
            self._fault(error)
        self.stats.last_stall_seconds = time.perf_counter() - started
        self.stats.stall_seconds += self.stats.last_stall_seconds

    def _finish(self) -> None:
        """Second half: wait for the copy, read what the loop changed since the step, queue the checkpoint."""
        under_way, engine = self._under_way, self._engine
        if under_way is None or engine is None:
            return
        started = time.perf_counter()
        self._under_way = None
        try:
            copied = self._copy_again(under_way, under_way.job.wait(), engine)
            self._count(copied, engine)
            if copied.ids.size or copied.sealed:
                late = plain(self._adapter.capture_late())
                policy = {"credit": engine.credit, "cursor": engine.cursor}
                engine.hand_over(copied, {"early": under_way.early, "late": late, "policy": policy})
        except Exception as error:
            engine.adopt_orphans()
            self._fault(error)
        seconds = time.perf_counter() - started
        self.stats.last_stall_seconds += seconds
        self.stats.stall_seconds += seconds

    def _copy_again(self, under_way: _UnderWay, copied: Copied, engine: Engine) -> Copied:
        """Repeat the copy of groups that somebody wrote to meanwhile; nothing writes to them during the repetition.

        Torch counts in-place writes to a tensor (`_version`); writes through `.data` escape it: `validate` finds those.
        """
        live, arena = under_way.live, engine.arena
        for g, (before, after) in enumerate(zip(under_way.counters, _counters(live), strict=True)):
            first, last = np.searchsorted(copied.ids, engine.layout.base[g : g + 2])
            ids = copied.ids[first:last]
            if before != after and ids.size:
                self.stats.torn_copies += 1
                copied = engine.copy_again(live, copied, g)
            elif under_way.snapshot is not None and ids.size:
                twin = live.with_tensors({g: under_way.snapshot[g]})
                torn = np.intersect1d(ids, np.flatnonzero(twin.changed()))
                if torn.size:
                    twin.save(torn, int(arena.version[torn[0]]))
                    self._fault(
                        Corruption(
                            f"{engine.layout.name(int(torn[0]))} was written while it was copied, unseen by torch",
                            hint="do not write through .data between optimizer steps; the copy was mended",
                        )
                    )
        return copied

    def _count(self, copied: Copied, engine: Engine) -> None:
        self.stats.checkpoints += 1
        self.stats.saved_bytes += int(engine.layout.partition_bytes[copied.ids].sum())
        if copied.nonfinite.size:
            if not self.stats.nonfinite_partitions:
                log.warning(
                    "step %d: %d partitions are not finite (first: %s); their last good copies are kept",
                    copied.step,
                    copied.nonfinite.size,
                    engine.layout.name(int(copied.nonfinite[0])),
                )
            self.stats.nonfinite_partitions += int(copied.nonfinite.size)

    def _fault(self, error: Exception) -> None:
        """A fault while saving never ends training unless the user wants it to."""
        self.stats.errors += 1
        if str(error) != self.stats.last_error:
            log.error("checkpoint at step %d failed: %s", self.head_step, error)
        self.stats.last_error = str(error)
        if self.settings.on_error == "raise":
            raise error

    # -- start and end ------------------------------------------------------------------------------------------

    def _make_saver(self) -> Saver:
        if not self.settings.daemon:
            return LocalSaver(self.store)
        folder = arena_folder(self.settings.arena_dir, self.store.id).parent
        return DaemonSaver(str(self.store.root), self.store.id, folder, self._ask)

    def _ask(self, full: bool) -> None:
        """Somebody wants a checkpoint after the next step. Called from another thread."""
        self._requested = full or bool(self._requested)

    def _start(self, layout: Layout) -> Engine:
        folder = arena_folder(self.settings.arena_dir, self.store.id)
        self._engine = Engine(self.store, layout, self.settings, folder, self._saver)
        self._engine.arena.head_step = self.head_step
        return self._engine

    def _started(self) -> Engine:
        self._check_open()
        if self._engine is None:
            raise UsageError(
                "nothing is saved before the first step: the optimizer has no state yet",
                hint="take a step, or resume(), first",
            )
        return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed")

    def _close_engine(self, engine: Engine, *, seal: bool) -> None:
        self._finish()
        # An optimizer's step that raised has left parameters half changed: what was saved before is better.
        if seal and not self._in_step and self.head_step > 0:
            self._closed = False
            self._begin(full=True)
            self._finish()
            self._closed = True
        try:
            durable = engine.close(self.settings.drain_timeout)
        except ScarError as error:
            self._fault(error)
            return
        if not durable:
            log.error(
                "not everything is durable in %s: %s. It stays in %s; the next session on this host goes on with it",
                self.store.url,
                engine.saver.fault(),
                engine.arena.folder,
            )

    def _live(self, engine: Engine, groups: list[StateGroup] | None = None) -> LiveState:
        """The model's tensors as they are now, checked against the layout."""
        tensors = []
        by_name = {group.name: group for group in groups or self._adapter.groups()}
        for group in engine.layout.groups:
            state = by_name.get(group.name)
            found = [state.tensors.get(spec.slot) for spec in group.tensors] if state else []
            if not found or any(
                t is None or tuple(t.shape) != spec.shape
                for t, spec in zip(found, group.tensors, strict=True)
            ):
                raise LayoutMismatch(
                    f"group {group.name!r} is no longer what it was when the layout was fixed",
                    hint="parameters may not be added, removed or resized while a session is open",
                )
            tensors.append([t for t in found if t is not None])
        if self._views is None or self._views.arena is not engine.arena:
            self._views = LiveState(engine.layout, tensors, engine.arena)
            return self._views
        return self._views.with_tensors(dict(enumerate(tensors)))

    def _build_layout(self) -> Layout:
        fixed = self.store.settings
        return build_layout(
            [(group.name, group.kind, _specs(group)) for group in self._adapter.groups()],
            partition_bytes=fixed.partition_bytes,
            rows=dict(fixed.rows),
            by_layer=fixed.by_layer,
            optimizer=self._adapter.optimizer,
        )

    def _check_model(self, layout: Layout) -> None:
        """Raise LayoutMismatch, naming every difference, unless the model and optimizer are those of `layout`.

        Before the first step the optimizer has no slots: those of the layout are taken as given.
        """
        stored = {group.name: group for group in layout.groups}
        groups = []
        for state in self._adapter.groups():
            known = stored.get(state.name)
            specs = _specs(state)
            if known is not None and len(specs) == 1:
                specs += tuple(replace(slot, shape=specs[0].shape) for slot in known.tensors[1:])
            groups.append(Group(state.name, state.kind, known.rows_per_partition if known else 1, specs))
        differences = layout.differences(Layout(groups, self._adapter.optimizer))
        if differences:
            raise LayoutMismatch(
                f"the model is not the one in {self.store.url}: " + "; ".join(differences[:10]),
                hint="build the model and optimizer as in the run to resume, or use a new store; nothing was changed",
            )

    def _refuse_unread_store(self) -> None:
        layout = self.store.current_layout()
        if layout is not None:
            raise UsageError(
                f"{self.store.url} holds an earlier run, and this one did not resume it",
                hint="call session.resume() before the loop, or use a new store; nothing was changed",
            )


def _as_list(value: Any) -> Sequence[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _specs(group: StateGroup) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(slot, name_of(tensor.dtype, group.name), tuple(tensor.shape))
        for slot, tensor in group.tensors.items()
    )


def _counters(live: LiveState) -> list[list[int]]:
    return [[t._version for t in group] for group in live.tensors]


def _check_step(step: int, head: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(f"step is {step!r}, not a whole number from 0 to {MAX_STEP}")
    if step <= head:
        raise UsageError(
            f"step {step} does not come after step {head}",
            hint='steps only grow; to go back, use session.recover("all", mode="rollback")',
        )
