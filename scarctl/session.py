"""The `Session` that `attach` returns saves, resumes and recovers one training process's state.

What a session does with the training thread's time: after the last optimizer's step it reads the extras that the next
batch will change, clones the buffers that the next forward will change, and starts the copy on a worker thread. Before
the next optimizer step it waits for what of the copy is not finished, reads the remaining extras, and queues the
checkpoint.

A flush does the same at any time between two steps, also from another thread (`scarctl.gate` keeps it and steps apart).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypeVar

from scarctl import attached, signals
from scarctl.adapter import Adapter, watch_of
from scarctl.binding import Binding
from scarctl.caveats import Caveats, caveats_of, reasons
from scarctl.checkpoint import Checkpoints, Stats
from scarctl.claiming import claim_saver
from scarctl.config import SessionSettings
from scarctl.daemon.folder import arena_folder, require_room
from scarctl.daemon.saver import Saver
from scarctl.engine import Engine
from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.execution import Report
from scarctl.gate import Gate
from scarctl.moment import Moment, Moments, check_step
from scarctl.naming import take_snapshot
from scarctl.opening import Opening
from scarctl.prediction import Mode
from scarctl.progress import Progress
from scarctl.requests import Due, Requests
from scarctl.restore import Resumed, check_mode, recover_live, said
from scarctl.resuming import Resumption, doubt
from scarctl.streams import Streams
from scarctl.together import Alone, Together
from scarctl.tracker import touched_of
from scarctl.worker import Worker

log = logging.getLogger("scarctl")
T = TypeVar("T")

FLUSH_SECONDS = 10.0
"""How long a flush waits for a running step to end."""
_LAST_DRAIN = 10.0
"""How long a process that a signal ends waits for the store, at most; it could be killed any time."""
_PATIENCE = 120.0
"""How long closing waits for a flush or a step in another thread."""


class Session:
    """One training process's checkpoints. Made by `attach`; `close` it, or use it in a `with` statement."""

    def __init__(
        self,
        adapter: Adapter,
        settings: SessionSettings,
        *,
        auto: bool | Literal["begin"],
        together: Together | None = None,
    ) -> None:
        """auto: see `attach`. together: the other ranks that train with this process, if there are any."""
        self.settings = settings
        self._together = together or Alone()
        self.stats = Stats()
        self.head_step = 0
        """Iterations finished so far, counted over restarts."""
        self.caveats = Caveats()
        """What of this run is not protected, or not exact; each was logged at WARNING."""
        self.resumed: Resumed | None = None
        """What `resume` returned, and why that is not exact if it turned out later."""
        self._adapter = adapter
        self._hooked = auto is True
        self._hooked_begin = auto == "begin"
        self._found_reasons: tuple[str, ...] = ()
        """Why what was resumed from is not exact, as the run knew that saved it."""
        self._closed = False
        self._pid = os.getpid()
        self._requests = Requests(self._together, self.recover, self._fault)
        self._gate = Gate(stepping=auto is False)
        self._progress = Progress(
            adapter,
            self._gate,
            self.caveats,
            self._together.rank,
            lambda: self.head_step,
            self._doubt,
            hooked=auto is True,
            framework=auto == "begin",
        )
        self._lasts = self._progress.framework
        self._streams = Streams()
        self._moments = Moments(adapter, self._streams, self._together)
        self._moment: Moment | None = None
        """The end of the newest step, if it is taken after every step."""
        self._flushed: int | None = None
        """The newest step that a flush has sealed."""
        self._doomed = False
        """A signal ends this process any moment: what was flushed has to stay as it is."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._together.close)
            self._touched = touched_of(adapter, settings, auto=bool(auto))
            self.store = self._together.open_store(settings)
            undo.callback(self.store.close)
            self._binding = Binding(adapter, self.store, self.caveats)
            self._saver = self._together.agree(self._claim, undo=lambda saver: saver.close())
            undo.callback(self._saver.close)
            self._opening = Opening(self.store, settings, self._saver, self._together, self.caveats)
            self._remove_hooks = self._install(auto)
            self._watch = watch_of(adapter, self.caveats)
            undo.pop_all()
        self._worker = Worker("scarctl-copy")
        self._checkpoints = Checkpoints(
            adapter,
            self._worker,
            self._streams,
            self.stats,
            self._fault,
            self.caveats,
            self._progress.extras,
            validate=settings.validate,
        )
        # Without this, a loop that just ends would lose what it did since the last checkpoint.
        atexit.register(self._at_exit)
        attached.opened(self)
        self._unwatch: Callable[[], None] = lambda: None
        if settings.flush_on_signal:
            self._unwatch = signals.watch(self._before_signal)

    def _install(self, auto: bool | Literal["begin"]) -> Callable[[], None]:
        if auto is False:
            return lambda: None
        return self._adapter.install(self._before_step, self._after_step if auto is True else None)

    def _claim(self) -> Saver:
        # Better now than at the first step.
        folder = arena_folder(self.settings.arena_dir, self.store.run_id)
        require_room(folder, self._binding.least_bytes(movements=self.settings.extrapolate))
        return claim_saver(self.store, self.settings, self._requests.add)

    # -- the loop -----------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Instead of `range(count)`: the numbers of the epochs that are not trained yet. See `batches`."""
        self._check_open()
        return self._progress.loop.epochs(count)

    @property
    def epoch(self) -> int:
        """The epoch of `epochs` that the loop is in, from 0."""
        return self._progress.loop.epoch

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Instead of `loader`: what of it this epoch's training has not used yet. Any iterable will do.

        A loop that reads its data here resumes exactly. Data, random numbers, schedulers and extras are then those of
        the moment at which the loop asked for the next batch. What else it does once per epoch belongs into the loop
        over `epochs`. Raises UsageError when the data end before the batch that was reached.
        """
        self._check_open()
        return self._progress.loop.batches(loader)

    def step(self, step: int | None = None) -> None:
        """Say that an iteration is over, where no hook says it. `step`: its number, if the loop counts itself.

        With `auto="begin"` it is none, and nothing happens, when no optimizer has stepped since the last one.
        Raises UsageError when `step` goes backwards or is negative, and where hooks say when an iteration is over.
        """
        self._check_open()
        if self._hooked:
            raise UsageError(
                "optimizers' steps count as iterations already: session.step() would count each twice",
                hint="leave out session.step(), or attach with auto=False",
            )
        if self._hooked_begin and not self.stepping:
            return
        if step is not None:
            check_step(step, self.head_step)
            self.head_step = step - 1
        if self._hooked_begin:
            self._after_step()
            return
        self._between_steps()
        self._after_step()
        with self._gate.held():
            self._finish()
        self._gate.enter()

    def checkpoint(self, *, full: bool = False, wait: bool = False) -> None:
        """Save now: one partial checkpoint, or the whole state as a sealed one. `wait`: until it is durable.

        Raises UsageError before the first step, when the optimizer has no state yet; with `wait` the fault for which it
        is not durable.
        """
        engine = self._started()
        with self._gate.held():
            self._finish()
            errors = self.stats.errors
            self._begin(self._progress.as_it_is(self._take), full=full)
            self._finish()
            failed = self.stats.errors > errors
        if not wait:
            return
        if failed:
            raise Unavailable(
                f"the checkpoint of step {self.head_step} failed: {self.stats.last_error}",
                hint="what was saved before is safe",
                kind="not-saved",
            )
        if not engine.saver.drain(self.settings.drain_timeout):
            raise engine.saver.fault()

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Bring the newest step into this host's memory, and queue it as one sealed checkpoint: at memory speed.

        A process that starts again on this host resumes from it exactly; what it leaves is made durable as usual. The
        extras are those of the step's end, if they are taken then (`flush_on_signal`). May be called in any thread.

        timeout: seconds to wait for a running step to end. Returns whether the state was sealed: not within a step,
        nor with values that are not finite. Raises UsageError before the first step.
        """
        self._started()
        with self._gate.quiet(timeout) as quiet:
            return quiet and not self._closed and self._seal(self._moment or self._take())

    def snapshot(self, name: str) -> int:
        """Save the whole state as a sealed checkpoint, and keep it under a name; returns its step.

        It stays until it is deleted (`scarctl prune --delete`). Returns when it is durable. Raises UsageError for a
        name that is taken or cannot be one, and before the first step; ScarError (kind "not-sealed") when values are
        not finite; the store's fault.
        """
        engine = self._started()
        take_snapshot(
            name, self.store, self._together, lambda: (engine.arena.whole, self.head_step), self.checkpoint
        )
        return self.head_step

    def resume(self, mode: Mode = "partial", snapshot: str | None = None) -> Resumed:
        """Restore what the store and this host's memory have, in place; an empty store changes nothing.

        mode: "partial" takes every partition's newest copy; "rollback" the newest state that is of one step everywhere;
        "auto" what is predicted to cost fewer iterations (see `recover`).
        snapshot: go back to the snapshot of this name, exactly.
        Returns the step to go on after, whether the state is exact, and the report.
        Raises LayoutMismatch (another model or optimizer), NoIntactCopy, Corruption; then nothing was changed.
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
            self.resumed = said(Resumed(step=0, exact=True, report=None), self.store)
            return self.resumed
        with self._gate.held():
            resumption = Resumption(
                self._adapter, self._binding, self.store, self._together, self._opening.open, self._go_on
            )
            resumed, moved = resumption.run(mode, snapshot)
            self._opening.looked()
            self.resumed = resumed = self._doubted(resumed)
            if moved:
                # Until this is durable the state is where it came from.
                self._seal(self._take())
            elif self._engine is not None and self.settings.flush_on_signal:
                # Until the next step ends, this is the newest one: an exception on the way there saves no later extras.
                self._take()
            self._progress.resumed(self.head_step, self._moment)
            return resumed

    def supersede(self, step: int = 0) -> None:
        """Instead of `resume`: go on with the live state, whatever an earlier run has saved to the store.

        The first step saves all of it, sealed, as the newest state. Until that is durable the store has the earlier
        run's; what of that waits for the store, or is newer in this host's memory, is given up.
        step: iterations that the live state has behind it.
        Raises UsageError after `resume` and after the first step, LayoutMismatch for another model or optimizer.
        """
        self._check_open()
        if self._engine is not None:
            raise UsageError(
                "supersede() comes before the first step, and instead of resume()",
                hint="to go on with the live state in a running loop nothing needs to be called",
            )
        if step:
            check_step(step, 0)
        layout = self._together.agree(self.store.current_layout)
        if layout is not None:
            self._together.agree(lambda: self._binding.check(layout))
        self._opening.looked(superseding=True)
        self.head_step = step

    def _doubt(self, found: Iterable[str]) -> None:
        """The loop does not continue as it would have: what was resumed was not exact."""
        self.resumed = doubt(self.resumed, tuple(found), self.caveats)

    def _doubted(self, resumed: Resumed) -> Resumed:
        """The same with why it is not exact: what the run that saved it knew, and mixed steps."""
        found = [tuple(theirs) for theirs in self._together.gather(list(self._found_reasons))]
        mixed = () if resumed.exact or not resumed.step else ("partitions are of several steps",)
        why = tuple(dict.fromkeys([*mixed, *(reason for theirs in found for reason in theirs)]))
        if why:
            # Saved again before a step, it is the same state, and no more exact than now.
            self.caveats.keep("resumed", "; ".join(why))
        return said(replace(resumed, exact=resumed.exact and not why, reasons=why), self.store)

    def _go_on(self, engine: Engine, resumed: Resumed, extras: Any) -> None:
        self._found_reasons = reasons(caveats_of(extras))
        if extras is not None:
            self._adapter.restore(extras["early"], extras["late"])
            engine.credit, engine.cursor = extras["policy"]["credit"], extras["policy"]["cursor"]
        self.head_step = resumed.step
        self._progress.restore(extras, resumed.step, exact=resumed.exact and not self._found_reasons)
        self._opening.go(engine, resumed.step)

    def recover(
        self,
        lost: str | int | Iterable[str | int],
        mode: Mode = "partial",
        max_rework: float | None = None,
    ) -> Report:
        """Restore lost partitions in the running process, in place; the others keep their progress.

        lost: shard numbers, patterns of group names ("layers.3.*", "emb.weight[0:512]"), or "all"; where several ranks
        train together numbers are those of ranks ("rank:2"), and all of them call this after the same step.
        mode: "partial", or "rollback" to the newest sealed state (everything, with its extras); that waits up to
        `drain_timeout` seconds for a sealed state that is on its way to the store; or "auto", which of the two is
        predicted to cost fewer iterations, partial where that cannot be told. The report's `cost` says both.
        max_rework: iterations that the way back may cost.
        Raises UsageError for a part that does not exist, NoIntactCopy when one has no copy, ScarError (kind
        "too-much-rework") when it may cost more, or that cannot be told; then nothing was changed.
        """
        engine = self._started()
        with self._gate.held():
            self._finish()
            live = self._binding.live(engine.arena)
            report = recover_live(
                engine, live, self._adapter, lost, mode, self.head_step, self._together, max_rework
            )
            # Whatever was flushed, taken or named before is not what the state is now.
            self._flushed = self._moment = None
            self._moments.identities.turn()
            if report.mode == "rollback" and report.step is not None:
                self.head_step = report.step
                engine.arena.head_step = report.step
            if self.settings.flush_on_signal:
                self._take()
        return report

    def close(self, *, seal: bool = True) -> None:
        """Save the whole state as a sealed checkpoint, wait up to `drain_timeout` seconds for the store, and let go.

        What is not durable by then stays in the arena, and the next session on this host goes on with it. While an
        exception is on its way the state of the newest step is flushed instead; see `flush`.
        """
        failed = sys.exc_info()[1] is not None
        self._close(seal=seal, as_it_is=not failed, failed=failed)

    @property
    def stepping(self) -> bool:
        """Whether an iteration has begun to change parameters and is not over. Always true where nothing says so."""
        return self._gate.stepping

    @property
    def lag(self) -> int:
        """How far the store is behind: iterations since the oldest copy that is not durable yet, 0 when all are."""
        return self._engine.lag() if self._engine is not None else 0

    def __enter__(self) -> Session:
        self._lasts = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(as_it_is=error is None, failed=error is not None)

    # -- hooks --------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        """Right before an optimizer changes parameters: the copy under way has to be finished."""
        if self._inert():
            return
        self._between_steps()
        with self.stats.stalled():
            self._gate.enter()
            # Not before: a flush that comes in between would take what the coming step changes for saved.
            self._note_touched()

    def _note_touched(self) -> None:
        if self._engine is None or self._touched is None:
            return
        try:
            self._engine.tracker.touch(self._touched())
        except Exception as error:
            self._engine.tracker.give_up_touched()
            self._fault(error)

    def _between_steps(self) -> None:
        if self._engine is None and self.head_step == 0:
            self._opening.require_looked()
        self._progress.step_begins()
        with self._gate.held(), self.stats.stalled(part=self._checkpoints.under_way):
            self._finish()

    def _after_step(self) -> None:
        """Right after the last optimizer's step: an iteration is over."""
        if self._inert():
            return
        # As long as this is held a flush cannot come between the parts.
        with self._gate.held():
            self._moment = None
            self._streams.follow()
            self.head_step += 1  # before a flush may come
            self.caveats.withdraw("resumed")
            self._gate.leave(self._progress.patience)
            self._watch.stepped()
            self._binding.require_savable()
            moment = None
            if self._engine is None:
                self._opening.start(self._binding.build_layout(), self.head_step)
                due: Due | None = Due(full=True)
            else:
                self._engine.arena.head_step = self.head_step
                due = self._requests.due(self._engine, self.head_step)
            with self.stats.stalled(first=due is not None, part=due is not None):
                if due is not None or self.settings.flush_on_signal:
                    moment = self._take(early=self._progress.reads_early)
                self._progress.step_ended(self.head_step, moment)
                if due is not None:
                    self._begin(moment, full=due.full, skip_if_behind=due.may_skip)
                if self._engine is not None:
                    self._checkpoints.look(self._engine)

    def _inert(self) -> bool:
        """A closed session, or a forked child's copy of one (a data loader's worker) does nothing."""
        return self._closed or self._doomed or os.getpid() != self._pid

    # -- one checkpoint, with the gate held -----------------------------------------------------------------------

    def _take(self, *, early: bool = True) -> Moment | None:
        """Take the moment. None when that fails."""
        try:
            moment = self._moments.take(self.head_step, early=early)
        except Exception as error:
            self._fault(error)
            return None
        if self.settings.flush_on_signal:
            self._moment = moment
        return moment

    def _begin(self, moment: Moment | None, *, full: bool, skip_if_behind: bool = False) -> None:
        """First half: start the copy of the state as it was at `moment`."""
        engine = self._engine
        if moment is None or engine is None or self._doomed:
            return
        try:
            live = self._binding.live(engine.arena)
            self._checkpoints.begin(engine, live, moment, full=full, skip_if_behind=skip_if_behind)
        except Exception as error:
            self._fault(error)

    def _finish(self) -> bool:
        """Second half, if one is under way; returns whether it has sealed the state."""
        if self._engine is None:
            return False
        self._engine.selector.hurry()
        copied = self._checkpoints.finish(self._engine)
        self._engine.selector.settle()
        return copied is not None and copied.sealed

    def _seal(self, moment: Moment | None) -> bool:
        """Both halves of a whole checkpoint at once, after what is under way."""
        self._finish()
        self._begin(moment, full=True)
        sealed = self._finish()
        if sealed and moment is not None:
            self._flushed = moment.step
        return sealed

    def _fault(self, error: Exception) -> None:
        """A fault while saving never ends training unless the user wants it to."""
        self.stats.errors += 1
        if self._opening.opened is not None:
            self._opening.opened.arena.errors = self.stats.errors
        if str(error) != self.stats.last_error:
            log.error("checkpoint at step %d failed: %s", self.head_step, error)
        self.stats.last_error = str(error)
        if self.settings.on_error == "raise":
            raise error

    # -- start and end ------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine | None:
        return self._opening.engine

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
        if os.getpid() != self._pid:
            raise UsageError(
                "this is a forked child's copy of the session",
                hint="call it in the process that attached it",
            )

    def _before_signal(self, fatal: bool) -> None:
        """SIGTERM or SIGINT has come; called in a thread, and this process ends right after it if it is `fatal`."""
        engine = self._engine
        with self._gate.quiet(FLUSH_SECONDS) as quiet:
            if self._inert() or engine is None:
                return
            if not quiet:
                log.warning("a signal came in a step that did not end: the state is not flushed")
            elif not self._ready():
                log.warning("a signal came, and the last copy does not end: the state is not flushed")
            elif self._moment is not None and self._seal(self._moment):
                log.info("a signal came: step %d is in this host's memory", self.head_step)
                if fatal:
                    self._rescue(engine, self._moment)
            self._doomed = fatal
            if fatal and not self._saver.outlives:
                engine.saver.drain(min(self.settings.drain_timeout, _LAST_DRAIN))

    def _at_exit(self) -> None:
        # The interpreter has told of an exception that nobody caught.
        self._close(as_it_is=False, failed=getattr(sys, "last_value", None) is not None)

    def _close(self, *, seal: bool = True, as_it_is: bool, failed: bool) -> None:
        """Seal and let go. `as_it_is`: the loop is between two iterations, else the end of its newest step counts.

        failed: an exception is on its way: a step that nobody saw begin may be half done.
        """
        if self._inert():
            return
        atexit.unregister(self._at_exit)
        attached.closed(self)
        try:
            self._watch.look()
        except Exception as error:  # what a watch has seen is worth a word, and not what is saved now
            log.error("training cannot be looked at once more: %s", error)
        with contextlib.ExitStack() as last:
            # Not before: a training thread that goes on meanwhile has to pass the gate.
            last.callback(self._remove_hooks)
            last.callback(self._watch.end)
            last.callback(self._together.close)
            last.callback(self.store.close)
            last.callback(self._worker.close)
            last.callback(self._let_go, failed)
            last.callback(lambda: self._checkpoints.rest(self._engine))
            last.callback(self._unwatch)
            last.callback(self._stop)
            with self._gate.quiet(_PATIENCE, between=not failed) as quiet:
                self._finish()
                # A step that raised has left parameters half changed: what was saved before is better.
                if seal and quiet and self.head_step > 0 and (as_it_is or self._flushed != self.head_step):
                    moment = self._progress.as_it_is(self._take) if as_it_is else self._moment or self._take()
                    errors = self.stats.errors
                    if not self._seal(moment) and self.stats.errors > errors:
                        # A signal's handler of somebody else may have raised in the middle of it.
                        self._seal(moment)
                    if failed and self._engine is not None and moment is not None:
                        self._rescue(self._engine, moment)

    def _ready(self) -> bool:
        """Wait a while for the copy under way; returns whether there is none any more."""
        if self._engine is not None:
            self._engine.selector.hurry()
        return self._checkpoints.ready(FLUSH_SECONDS)

    def _rescue(self, engine: Engine, moment: Moment) -> None:
        """The state of `moment` is saved, and this process ends because something failed, perhaps elsewhere."""
        whole = engine.arena.whole if self._flushed == moment.step else ""
        self._together.rescue(
            self.store, moment.step, lambda: self._checkpoints.extras(engine, moment), whole
        )

    def _stop(self) -> None:
        self._closed = True
        self._progress.close()
        self._gate.end()

    def _let_go(self, failed: bool) -> None:
        try:
            self._opening.close(failed=failed)
        except ScarError as error:
            self._fault(error)
