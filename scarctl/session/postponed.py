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

_AT_ONCE = {signal.SIGINT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
"""Ctrl-C, and timers that limit how long a call may take."""


@contextmanager
def postponed() -> Iterator[None]:
    """Run other packages' handlers of signals that arrive inside only at the end, in the main thread.

    An exception of a handler is raised then. Handlers that are not written in Python take effect at once, and so do
    those of Ctrl-C and of timers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if signum not in arrived:
            arrived.append(signum)

    usual = {number: signal.getsignal(number) for number in signal.valid_signals() - _AT_ONCE}
    with ExitStack() as at_last:
        at_last.callback(_raise_all, arrived)
        for number, handler in usual.items():
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
