"""Let other packages' signal handlers wait while a session saves its last state.

Python runs a handler in the main thread, between any two calls there, and an exception of the handler ends the function
that runs. Lightning's handler of SIGTERM raises if it cannot reach a rank that has died. Torch's handler of SIGCHLD
raises if a worker of a DataLoader has died. Both happen just when a failed loop closes its session.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

_WAIT = (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose handlers wait: not those of Ctrl-C, and of timers that limit how long a call may take."""


@contextmanager
def postponed() -> Iterator[None]:
    """Run other packages' handlers of some signals that arrive inside only at the end, in the main thread.

    An exception of a handler is raised then. Signals without a handler in Python take effect at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if signum not in arrived:
            arrived.append(signum)

    with ExitStack() as at_last:
        at_last.callback(_raise_all, arrived)
        for number in _WAIT:
            handler = signal.getsignal(number)
            if callable(handler) and not _is_ours(handler):
                at_last.callback(_restore, number, note, handler)
                signal.signal(number, note)
        yield


def _is_ours(handler: object) -> bool:
    """Return whether `scarctl.session.signals` has installed it: it only notes the signal, for other threads."""
    return str(getattr(handler, "__module__", "")).startswith("scarctl.")


def _restore(number: int, ours: object, handler: signal._HANDLER) -> None:
    if signal.getsignal(number) is ours:
        signal.signal(number, handler)


def _raise_all(arrived: list[int]) -> None:
    if arrived:
        try:
            signal.raise_signal(arrived[0])
        finally:
            _raise_all(arrived[1:])
