"""Save one session's last state: when it is closed, when an exception or a signal ends its loop, or at exit."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from types import FrameType

import numpy as np

from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.step_end import Moment
from scarctl.errors import ScarError
from scarctl.session.opening import Parts
from scarctl.session.progress import UNKNOWN
from scarctl.session.saving import TORN, Saving
from scarctl.state.version import NEVER, step_of

log = logging.getLogger("scarctl")

_LAST_DRAIN = 10.0
"""Longest wait for the store after a fatal signal, in seconds: SIGKILL may follow at any time."""
_PATIENCE = 120.0
"""Seconds that closing waits for a flush or a step in another thread."""


_WAIT = (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose handlers wait: not those of Ctrl-C, and of timers that limit how long a call may take."""
AGAIN = 1.0
"""Seconds after which a signal that comes again does not wait. Launchers forward what their process group received."""


class Ending(Enum):
    """Reasons why a session ends."""

    CLOSED = "closed"
    """The loop has closed it, between two iterations: the live state is saved."""
    EXIT = "exit"
    """The process ends: the state of the newest step's end is saved."""
    FAILED = "failed"
    """An exception was raised: as for EXIT, unless a step may be half done, and without waiting for the store."""


class LastState:
    """Saves the last state of one session."""

    def __init__(self, parts: Parts, saving: Saving) -> None:
        """Use the session's parts."""
        self._settings = parts.settings
        self._opening = parts.opening
        self._journal = parts.journal
        self._progress = parts.progress
        self._automatic = parts.adapter.automatic
        self._gate = parts.gate
        self._together = parts.together
        self._saving = saving

    def before_signal(self, *, fatal: bool, patience: float) -> bool:
        """Flush before SIGTERM or SIGINT takes effect, inside `quiet`. fatal: the signal then ends this process.

        patience: seconds to wait for the current copy.
        Returns whether the newest step is sealed in memory.
        """
        engine, errors = self._opening.engine, self._saving.stats.errors
        assert engine is not None, "nothing is flushed before the first step"
        engine.selector.hurry()
        if not self._saving.ready(patience):
            log.warning("a signal arrived, but the current copy does not end: the state is not flushed")
            return False
        if self._saving.resumed_at == self._progress.head_step:
            return True  # the store has what was resumed
        moment = self._saving.newest_end()
        if moment is not None and self._saving.seal(moment):
            known = "" if moment.declared else ". " + UNKNOWN[0].upper() + UNKNOWN[1:]
            log.info("a signal arrived: step %d is kept in shared memory%s", self._progress.head_step, known)
            if fatal:
                self._rescue(engine, moment)
            return True
        self._report_unsaved(engine, failed=moment is None or self._saving.stats.errors > errors)
        return False

    def _report_unsaved(self, engine: Engine, *, failed: bool, why: str = "") -> None:
        """Log that the run ends without a sealed copy of its newest step. `fault` logs a lasting error only once.

        failed: an error is the reason, not `why`.
        """
        engine.adopt()  # the state before it is the newest one then
        why = why or (TORN if self._gate.torn else self._saving.unsealed)
        head, reason = self._progress.head_step, (failed and self._saving.stats.last_error) or why
        if engine.filling.since == head:
            log.error(
                "the run ends at step %d, from which it resumed, and changes since then are not saved: %s. The store "
                "has what was resumed",
                head,
                reason,
            )
            return
        log.error(
            "the run ends, and step %d is not saved as a whole: %s. The newest copies are of step %d",
            head,
            reason,
            step_of(int(np.maximum(engine.arena.newest(), engine.arena.durable).max(initial=NEVER))),
        )

    def end_now(self, *, wait: bool) -> None:
        """Stop saving, because a signal ends this process. wait: first wait a while for the store."""
        engine = self._opening.engine
        self._saving.doomed = self._saving.over = True
        self._gate.freeze()
        if wait and engine is not None and not engine.saver.outlives:
            engine.saver.drain(min(self._settings.timeout, _LAST_DRAIN))

    def save(self, ending: Ending, stop: Callable[[], None], *, seal: bool) -> None:
        """Finish the current checkpoint; with `seal`, save the whole state. Call `stop` before a step can begin."""
        failed = ending is Ending.FAILED
        with undisturbed(), contextlib.ExitStack() as inside:
            quiet = inside.enter_context(self._gate.quiet(_PATIENCE, between=not failed))
            inside.callback(stop)
            inside.enter_context(self._saving.streams.joined())
            self._saving.finish()
            head, engine = self._progress.head_step, self._opening.engine
            if not (seal and head > 0):
                return
            # A step that raised may have changed only some parameters: the previous checkpoint is better.
            if not quiet:
                if not (self._saving.doomed or engine is None or engine.is_sealed()):
                    self._report_unsaved(engine, failed=False, why="a later step did not end")
                return
            closed, saving = ending is Ending.CLOSED, self._saving
            if not closed and head in (saving.flushed, saving.resumed_at):
                return
            if closed:
                self._journal.add("closed", head)
            moment = saving.take_between() if closed else saving.newest_end()
            errors = saving.stats.errors
            sealed = saving.seal(moment)
            if not sealed and saving.stats.errors > errors:
                # Another package's signal handler may have raised within the copy.
                sealed = saving.seal(moment)
            if not (sealed or saving.doomed or engine is None):
                self._report_unsaved(engine, failed=moment is None or saving.stats.errors > errors)
            if failed and engine is not None and moment is not None:
                self._rescue(engine, moment)

    def release(self, ending: Ending) -> None:
        """Close the engine, and end the copy thread. After a failure, leave pending copies to the daemon."""
        with contextlib.ExitStack() as last:
            last.callback(self._saving.worker.close)
            last.callback(self._close, ending)

    def _close(self, ending: Ending) -> None:
        if self._opening.opened is None and not self._automatic and ending is not Ending.FAILED:
            log.warning(
                "%s: nothing was saved, because no iteration has ended. Call session.step() at the end of each",
                self._opening.store.url,
            )
        try:
            self._opening.close(failed=ending is Ending.FAILED)
        except ScarError as error:
            self._saving.fault(error)

    def _rescue(self, engine: Engine, moment: Moment) -> None:
        """Update the arenas of dead ranks, once the state of `moment` is saved after a failure. No part may be lost."""
        if engine.marked.told:
            return
        whole = engine.arena.whole if self._saving.flushed == moment.step else ""
        store = self._opening.store
        self._together.rescue(store, moment.step, lambda: self._saving.extras(engine, moment), whole)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run other packages' handlers of some signals that come inside only at the end, in the main thread.

    Lightning's of SIGTERM raises if a rank has died, torch's of SIGCHLD if a loader's worker has: both happen just when
    a failed loop closes its session. An exception of a handler is raised at the end. A signal that is sent again later,
    except SIGCHLD, does not wait: the block may be held up.
    """
    came: dict[int, float] = {}
    over = False

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = came.setdefault(number, now)
        # It may be over for a handler that was installed inside, and calls this one.
        if over or (number != signal.SIGCHLD and now > first + AGAIN):
            del came[number]
            handlers[number](number, frame)

    def let(number: int) -> None:
        if signal.getsignal(number) is note:
            signal.signal(number, handlers[number])
        if came.pop(number, None) is not None:
            handlers[number](number, sys._getframe())

    def end() -> None:
        nonlocal over
        over = True

    main = threading.current_thread() is threading.main_thread()
    found = [(number, signal.getsignal(number)) for number in _WAIT if main]
    # This package's own handlers note signals for other threads.
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {
        number: handler
        for number, handler in found
        if callable(handler) and not str(getattr(handler, "__module__", "")).startswith("scarctl.")
    }
    with contextlib.ExitStack() as at_last:  # all of these happen, also if one raises
        for number in handlers:
            at_last.callback(let, number)
            signal.signal(number, note)
        at_last.callback(end)
        yield
