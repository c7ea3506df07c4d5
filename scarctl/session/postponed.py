"""Let other packages' signal handlers wait while a session saves its last state.

Python runs a handler in the main thread, between any two calls there, and an exception of the handler ends the function
that runs. Lightning's handler of SIGTERM raises if it cannot reach a rank that has died. Torch's handler of SIGCHLD
raises if a worker of a DataLoader has died. Both happen just when a failed loop closes its session.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_WAIT = (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose handlers wait: not those of Ctrl-C, and of timers that limit how long a call may take."""
AGAIN = 1.0
"""Seconds after which a signal that comes again does not wait. Launchers forward what their process group received."""


@contextmanager
def postponed() -> Iterator[None]:
    """Run other packages' handlers of some signals that arrive inside only at the end, in the main thread.

    An exception of a handler is raised then. Signals without a handler in Python take effect at once. If a signal is
    sent again later, its handler runs at once, except that of SIGCHLD: the block may be held up.

    In a thread that is not the main one, nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = _Waiting()
    with ExitStack() as at_last:  # all of these happen, also if one raises
        for number in _WAIT:
            at_last.callback(waiting.let, number)
        at_last.callback(waiting.end)
        waiting.begin()
        yield


class _Waiting:
    """Stands in for the handlers that wait."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: dict[int, float] = {}
        """Signals whose handlers have not run yet, with the times at which they came first."""
        self._over = False

    def begin(self) -> None:
        for number in _WAIT:
            handler = signal.getsignal(number)
            if callable(handler) and not _is_ours(handler):
                self._handlers[number] = handler
                signal.signal(number, self.note)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: note it, or have its handler run now."""
        now = time.monotonic()
        first = self._came.setdefault(signum, now)
        again = signum != signal.SIGCHLD and now > first + AGAIN
        if self._over or again:  # a handler that was installed meanwhile may call this one later
            self._came.pop(signum, None)
            self._handlers[signum](signum, frame)

    def end(self) -> None:
        """Have signals that come from now on wait no longer."""
        self._over = True

    def let(self, number: int) -> None:
        """Install a signal's handler again, and run it if the signal has come."""
        handler = self._handlers.get(number)
        if handler is None:
            return
        if signal.getsignal(number) == self.note:
            signal.signal(number, handler)
        if self._came.pop(number, None) is not None:
            # Not sent once more: an event loop, and `scarctl.session.signals`, have read it from the wakeup file.
            handler(number, sys._getframe())


def _is_ours(handler: object) -> bool:
    """Return whether a module of this package has installed it.

    That of `scarctl.session.signals` notes the signal for other threads. They have the handler before it called after a
    flush, which waits a limited time for the block's end. That of an outer block waits already.
    """
    return str(getattr(handler, "__module__", "")).startswith("scarctl.")
