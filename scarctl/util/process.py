"""Find out whether a process lives."""

from __future__ import annotations

import os
from pathlib import Path


def exists(pid: int) -> bool:
    """Return whether a process with this number, of any user, lives. False for 0 and less, which are groups.

    A process that has ended, and that its parent has not collected yet, does not live. Only Linux shows that.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not _waits_for_its_parent(pid)


def _waits_for_its_parent(pid: int) -> bool:
    """Return whether the process has ended with all of its threads. By then the system has released its locks."""
    of_process = Path("/proc") / str(pid)
    try:
        # The second field is the program's name in parentheses, which may contain spaces and parentheses.
        state = (of_process / "stat").read_bytes().rpartition(b") ")[2][:1]
        return state in (b"Z", b"X") and len(os.listdir(of_process / "task")) <= 1
    except OSError:
        return False  # this system does not show it
