"""Leave the processor to training, and take it while training waits."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

POLITE = 10
"""Niceness, above training's, of work that training does not wait for."""
_MOST = 19


def be_polite(thread: int | None = None) -> None:
    """Lower the priority of a thread, by default this one, below that of the process's main thread.

    thread: its native id.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the work can be done at any priority
            usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
            os.setpriority(os.PRIO_PROCESS, thread or threading.get_native_id(), min(_MOST, usual + POLITE))


def set_session(niceness: int, pid: int) -> None:
    """Set the niceness of the session of process `pid`; 0: unknown. Call it again: the system may refuse it at first.

    Linux shares the processor among sessions before threads, so niceness within a session says nothing to others. A
    user may raise and lower it between 0 and 19, and all users together once in 0.1 s.
    """
    session = Path(f"/proc/{pid}/autogroup")
    with contextlib.suppress(
        OSError
    ):  # the process has ended, or the system shares the processor in other ways
        if not session.read_text().endswith(f"nice {niceness}\n"):
            session.write_text(str(niceness))
