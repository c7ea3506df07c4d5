"""Leave the processor to training, and take it while training waits."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from pathlib import Path

POLITE = 10
"""Niceness of work that training does not wait for."""


def be_polite() -> None:
    """Lower this thread's priority below that of the training."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the work can be done at any priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POLITE)


def set_session(niceness: int, pid: int) -> bool:
    """Set the niceness of the session of process `pid`; 0: unknown. Return False if it has to be repeated.

    Linux shares the processor among sessions before threads, so niceness within a session says nothing to others. A
    user may raise and lower it between 0 and 19, and all users together once in 0.1 s.
    """
    if sys.platform != "linux" or not pid:
        return True
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    except OSError as error:
        return error.errno != errno.EAGAIN  # other systems share the processor in other ways
    return True
