"""Offer the `Session` that `attach` returns: it saves, resumes and recovers one training process's state."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, TypeVar

from scarctl.adapter import Adapter, watch_of
from scarctl.checkpoint.binding import Binding
from scarctl.checkpoint.checkpointer import Stats
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.step_end import check_step
from scarctl.checkpoint.tracker import touched_of
from scarctl.config import Hooks, Mode, SessionSettings
from scarctl.config.checks import check_mode, notice_of
from scarctl.errors import UsageError
from scarctl.policy.turns import Turn
from scarctl.recovery.report import Report
from scarctl.session import attached
from scarctl.session.departure import Departure
from scarctl.session.ending import Ending, LastState
from scarctl.session.gate import Gate
from scarctl.session.opening import Opening, Parts, claim
from scarctl.session.peers import Together, check_wait
from scarctl.session.progress import Progress
from scarctl.session.requests import Requests, answer
from scarctl.session.resume import Resumption
from scarctl.session.resumed import Resumed, facts, labelled, logged
from scarctl.session.saving import FLUSH_SECONDS, Saving
from scarctl.session.steps import Follower, Steps
from scarctl.state.caveats import Caveats
from scarctl.state.journal import Journal
from scarctl.state.layout import Layout
from scarctl.store.term import who

if TYPE_CHECKING:
    from scarctl.daemon.request import Request
    from scarctl.persist.evacuated import Evacuated
    from scarctl.session.lost import LostParts

log = logging.getLogger("scarctl")
T = TypeVar("T")


class Session:
    """One training process's checkpoints. Made by `attach`; `close` it, or use it in a `with` statement."""

    def __init__(
        self,
        adapter: Adapter,
        settings: SessionSettings,
        *,
        hooks: Hooks,
        together: Together | None = None,
    ) -> None:
        """Claim the store. hooks: see `attach`. together: the other ranks that train with this process, if any."""
        self.settings = settings
        self.caveats = Caveats()
        """Warnings of this run: parts that are not protected, or cannot be repeated. Each was logged at WARNING."""
        self._together = together or Together()
        self._adapter = adapter
        self._hooked, self._hooked_begin = hooks == "auto", hooks == "begin"
        self._journal = Journal()
        self._journal.add("started", 0, process=who())
        self.follower: Follower | None = None
        self._closed, self._pid = False, os.getpid()
        self._requests, self._gate = Requests(self._together), Gate(stepping=hooks == "off")
        self._progress = Progress(self.caveats, self._together.rank, hooked=hooks == "auto")
        self._resumed: Resumed | None = None
        self._lasts = hooks == "begin"
        with contextlib.ExitStack() as undo:
            undo.callback(self._together.close)
            touched = touched_of(adapter, hooked=hooks != "off")
            self.store = self._together.open_store(settings)
            undo.callback(self.store.close)
            self._binding = Binding(adapter, self.store, self.caveats)
            self._saver = self._together.agree(
                lambda: claim(self.store, settings, self._binding, self._requests),
                undo=lambda saver: saver.close(),
            )
            undo.callback(self._saver.close)
            self._opening = Opening(self.store, settings, self._saver, self._together, self.caveats)
            shared = (adapter, settings, self._together, self._gate, self._progress, self._binding)
            parts = Parts(*shared, self._opening, self._journal)
            self._saving, self._parts = Saving(parts), parts
            undo.callback(self._saving.worker.close)
            self._watch = watch_of(adapter, self.caveats)
            undo.callback(self._watch.end)
            self._steps = Steps(self, parts, self._requests, self._saving, self._watch, touched)
            self._remove_hooks = self._install(hooks)
            undo.pop_all()
        self._resumption = Resumption(parts)
        # A loop that ends without `close` would lose the steps since its last checkpoint.
        atexit.register(self._at_exit)
        attached.opened(self)
        self._last = LastState(parts, self._saving)
        self._departure = Departure(parts, self._saving, self._last, self._inert)
        self._requests.flush = self._departure.requested
        self._unwatch = self._departure.watch_signals()

    def _install(self, hooks: Hooks) -> Callable[[], None]:
        if hooks == "off":
            return lambda: None
        return self._adapter.install(self._steps.before, self._steps.after if hooks == "auto" else None)

    @property
    def adapter(self) -> Adapter:
        """The adapter of the training framework. With several ranks, it covers the rows that this rank owns."""
        return self._adapter

    @property
    def layout(self) -> Layout:
        """The groups and partitions of the state. Raises UsageError before the first step, unless resumed."""
        return self._saving.require_started().layout

    @property
    def stats(self) -> Stats:
        """Counts of this session's work."""
        return self._saving.stats

    @property
    def head_step(self) -> int:
        """Iterations finished so far, counted over restarts."""
        return self._progress.head_step

    @property
    def resumed(self) -> Resumed | None:
        """The result of `resume`; None before it."""
        return self._resumed

    @property
    def stepping(self) -> bool:
        """Whether an iteration has begun to change parameters and not ended. Without hooks `step` leaves it true."""
        return self._gate.stepping

    @property
    def fencing_token(self) -> int:
        """First epoch of this process in the store's log. A newer writer has a larger one. 0 before the first step."""
        return 0 if self._engine is None else self._engine.arena.base_epoch

    @property
    def lag(self) -> int:
        """Iterations since the oldest copies that wait for the store were made; 0 if none wait."""
        return self._engine.lag() if self._engine is not None else 0

    def metrics(self, prefix: str = "scarctl/") -> dict[str, float]:
        """Return the session's figures by name, for any logger; docs/metrics.md has names and units."""
        from scarctl.session.metrics import measure

        alone = not self._together.several
        return measure(prefix, self._saving.stats, self.head_step, self.caveats, self._engine, alone=alone)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of epochs not trained yet: use this instead of `range(count)`. See `batches`."""
        self._check_open()
        return self._progress.loop.epochs(count)

    @property
    def epoch(self) -> int:
        """The loop's current epoch in `epochs`, from 0."""
        return self._progress.loop.epoch

    @property
    def batch(self) -> int:
        """Number of the newest batch from `batches` in its epoch, from 0. `enumerate` would restart at a resume."""
        return self._progress.loop.batch

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of `loader`, any iterable, that this epoch has not used yet: use this instead of `loader`.

        Each request for the next batch declares that the newest step has ended: then extras, random numbers and the
        position in the data are read. Work per epoch belongs after the batches. Raises UsageError if the data end too
        early.
        """
        self._check_open()
        return self._progress.loop.batches(loader)

    def step(self, step: int | None = None) -> None:
        """Count an iteration, if no hook counts it. `step`: its number, if the loop has its own count.

        With `hooks="begin"`, the call is ignored if no optimizer has stepped since the last iteration.
        Raises UsageError if `step` decreases or is negative, or if hooks count the iterations.
        """
        self._check_open()
        if self._hooked:
            raise UsageError(
                "optimizers' steps count as iterations already: session.step() would count each twice",
                hint="omit session.step(), or attach with hooks='off'",
            )
        if self._hooked_begin and not self.stepping:
            return
        self._steps.counted(step, hooked=self._hooked_begin)

    def iteration(self) -> AbstractContextManager[None]:
        """Run one iteration: `with session.iteration():` around all that changes the state. Replaces `step`.

        Between two blocks a flush, SIGTERM or an evacuation saves the state at once. Within one they wait for its end.
        Blocks of several threads run one after the other. A block that raises is not counted. Its changes stay, and
        nothing is saved as a whole until another block has ended.
        Raises UsageError within another block, or if hooks count the iterations.
        """
        self._check_open()
        if self._hooked or self._hooked_begin:
            raise UsageError(
                "hooks count the iterations, and show when none is running", hint="omit session.iteration()"
            )
        return self._steps.block()

    def checkpoint(self, *, full: bool = False, wait: bool | Literal["peers"] = False) -> None:
        """Save now: one partial checkpoint, or with `full` the whole state, sealed.

        wait: True until it is durable; "peers" until other hosts have it in memory, as many as `peer_ack` says.
        If a slow store still reads an earlier step from memory, a later one is saved; `wait` waits for that first.
        If `full` cannot seal the state, because values are not finite, raises ScarError ("not-sealed") with `wait`, and
        warns without. `wait` also raises Unavailable and the store's fault. Before the first step: UsageError.
        """
        check_wait(wait, self.settings)
        self._check_open()
        with self._gate.outside("checkpoint()"):
            self._progress.declare()
            engine = self._started()
            why = self._saving.now(Turn.WHOLE if full else Turn.PART, self.settings.timeout if wait else 0.0)
        if wait:
            self._saving.require(engine, wait, why)
        elif full and why:
            log.warning("step %d is not saved as a whole: %s; earlier ones are safe", self.head_step, why)

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Copy the newest step into shared memory at memory speed, as one whole state, and have it saved.

        A process that restarts on this host resumes from it. The checkpoint becomes durable as usual. For any thread.
        timeout: seconds to wait until a running step has ended and the loop has declared that (docs/loops.md), for a
            slow store that still reads an earlier step from memory, and after a resume for memory to have its copies.
        Returns whether it was sealed: not while a step runs, or if values are not finite. UsageError before any step.
        """
        self._started()
        if self._gate.trainer == threading.get_ident() and not self.stepping:
            self._progress.declare()
        with self._gate.quiet(timeout) as quiet:
            return quiet and not self._closed and self._saving.flush(timeout)

    def evacuate(self, seconds: float, to: str | None = None) -> Evacuated:
        """Flush, then save to `peers` and the store what the time allows, most changed first. For any thread.

        seconds: time until the host shuts down, 0 to 86,400. The call returns earlier, even if the store hangs.
        to: name or address of a host of the job: its memory, then the store. "store": the store alone.
        Returns what is safe, what would be lost, and the predicted rework. Raises UsageError for any other host.
        """
        self._started()
        return self._departure.evacuate(notice_of("seconds", seconds), to)

    def snapshot(self, name: str) -> int:
        """Save the whole state, sealed, under a name that keeps it until deleted. Return its step once durable.

        Raises UsageError for a name that exists or is not allowed; ScarError ("not-sealed") if values are not finite.
        """
        from scarctl.session.snapshot import save_named

        self._check_open()
        self._gate.require_outside("snapshot()")
        self._progress.declare()
        engine = self._started()

        def save() -> str:
            self.checkpoint(full=True, wait=True)
            return engine.arena.whole

        save_named(name, self.store, self._together, save, self.head_step)
        return self.head_step

    def resume(self, mode: Mode = "auto", snapshot: str | None = None) -> Resumed:
        """Restore the state from the store and this host's memory, in place. An empty store changes nothing.

        mode: "partial" takes every partition's newest copy, "rollback" the newest state of one step. "auto" rolls
            back unless the copies are of one step, as memory's are, or are ten times newer.
        snapshot: restore the snapshot of this name, and no other state.
        Returns the step after which to continue, its label, and the report. Raises LayoutMismatch (another model or
        optimizer), NoIntactCopy, Corruption; nothing is changed then.
        """
        self._check_open()
        check_mode(mode)
        if self._engine is not None:
            raise UsageError(
                "resume() comes before the first step", hint="use session.recover() in a running loop"
            )
        if not self._together.holds_earlier_run(self.store):
            if snapshot is not None:
                raise UsageError(
                    f"{self.store.url} has no snapshot {snapshot!r}: nothing is saved there",
                    hint="check the address; without a snapshot, resume() begins a new run there",
                )
            self._resumed = logged(Resumed(), self.store)
            return self._resumed
        with self._gate.outside("resume()"):
            found = self._resumption.run(mode, snapshot)
            self._opening.looked()
            self._resumed = resumed = labelled(found, self.store, self._together)
            label, report = resumed.label, resumed.report
            if not label.of_one:
                self._progress.mixed(label.reasons)
            if not resumed.new:
                self._journal.add("resumed", resumed.step, reached=resumed.reached, **facts(label, report))
            if report is None and not resumed.new:
                # Until this seal is durable, the old shards still have the state.
                self._saving.seal(self._saving.take())
            elif self._engine is not None:
                self._saving.resumed(self._engine)
            return resumed

    def supersede(self, step: int = 0) -> None:
        """Continue with the live state instead of calling `resume`, and replace the state in the store.

        The first step saves the whole live state, sealed, as the newest one. Until that is durable, the store keeps the
        earlier run's state. Pending copies of that run, and newer ones in this host's memory, are discarded.
        step: iterations that it has finished. Raises UsageError after `resume` and after the first step, LayoutMismatch
        for another model or optimizer.
        """
        self._check_open()
        if self._engine is not None:
            raise UsageError(
                "supersede() comes before the first step, and instead of resume()",
                hint="a running loop continues with the live state anyway",
            )
        if step:
            check_step(step, 0)
        layout = self._together.agree(self.store.current_layout)
        if layout is not None:
            self._together.agree(lambda: self._binding.check(layout))
        self._opening.looked(superseding=True)
        self._progress.restore(None, step)

    def mark_lost(self, lost: str | int | Iterable[str | int]) -> int:
        """Note that parts of the live state are lost: memory keeps its last state, until `recover` has restored them.

        A copy that is under way is given up, and no other one is made, also by a flush, SIGTERM or `close`. For any
        thread. lost: see `recover`. Each rank marks its own. Returns the number of partitions.
        Raises UsageError for an unknown part, and before the first step.
        """
        return self._lost().mark(self._started(), lost)

    def recover(
        self,
        lost: str | int | Iterable[str | int] | None = None,
        mode: Mode = "partial",
        max_rework: float | None = None,
        *,
        before: int | None = None,
    ) -> Report:
        """Restore lost partitions in the running process, in place. Other partitions keep their progress.

        lost: shard numbers, patterns of group names ("layers.3.*", "emb.weight[0:512]"), or "all". Several ranks have
            numbers of ranks ("rank:2"), and call this after the same step. None: what `mark_lost` has marked.
        mode: "partial" restores lost partitions only. "rollback" restores the newest sealed state, with its extras,
            and waits up to `timeout` seconds while it is being saved. "auto" takes the mode with the lower predicted
            cost in iterations, partial without a prediction. The report's `cost` has both.
        max_rework: most predicted rework, in iterations.
        before: take no copies of later steps than this. Memory has two copies of each partition: if both are later,
            the store's newest copy that is not later is taken.
        Raises UsageError for a part that does not exist, NoIntactCopy if a partition has no copy. Raises ScarError
        (kind "too-much-rework") if the predicted rework exceeds `max_rework` or is unknown. Changes nothing then.
        """
        engine = self._started()
        with self._gate.outside("recover()"):
            return self._lost().recover(engine, lost, mode, max_rework, before)

    def close(self, *, seal: bool = True) -> None:
        """Save the whole state as a sealed checkpoint, wait up to `timeout` seconds for the store, and release it.

        Copies that are not durable by then stay in the arena, and the next session on this host saves them. During an
        exception the state of the newest step is flushed instead; see `flush`.
        """
        self._gate.require_outside("close()")
        failed = sys.exc_info()[1] is not None
        self._close(Ending.FAILED if failed else Ending.CLOSED, seal=seal)

    def __enter__(self) -> Session:
        self._lasts = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(Ending.CLOSED if error is None else Ending.FAILED)

    def _lost(self) -> LostParts:
        from scarctl.session.lost import LostParts

        return LostParts(self._parts, self._saving)

    def _grant(self, request: Request) -> None:
        """Carry out a command's recovery, and answer it."""
        found = answer(
            lambda: self.recover(request.lost, "partial", request.max_rework), self.head_step, self._together
        )
        if request.number:
            self._saver.answer(request.number, found)

    def _inert(self) -> bool:
        """Return whether hooks do nothing: the session is closed, or a copy in a forked child (a loader's worker)."""
        return self._closed or self._saving.doomed or os.getpid() != self._pid

    @property
    def _engine(self) -> Engine | None:
        return self._opening.engine

    def _started(self) -> Engine:
        self._check_open()
        return self._saving.require_started()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the session is closed")
        if os.getpid() != self._pid:
            raise UsageError(
                "this is a forked child's copy of the session", hint="call it in the process that attached it"
            )

    def _at_exit(self) -> None:  # the interpreter keeps an exception that was not caught
        self._close(Ending.EXIT if getattr(sys, "last_value", None) is None else Ending.FAILED)

    def _close(self, ending: Ending, *, seal: bool = True) -> None:
        """Save the whole state, and release all resources."""
        if os.getpid() == self._pid:
            self._departure.settle()
            self._steps.closing(failed=ending is Ending.FAILED)
        if self._inert():
            return
        atexit.unregister(self._at_exit)
        attached.closed(self)
        with contextlib.ExitStack() as last:
            # Removed last, because a training thread that continues meanwhile has to pass the gate.
            last.callback(self._remove_hooks)
            last.callback(self._watch.end)
            last.callback(self._together.close)
            last.callback(self.store.close)
            last.callback(self._last.release, ending)
            last.callback(self._unwatch)
            last.callback(self._stop)
            if ending is Ending.CLOSED and not self.stepping:
                self._progress.declare()
            self._last.save(ending, self._stop, seal=seal)

    def _stop(self) -> None:
        self._closed = self._saving.over = True
        self._gate.end()
