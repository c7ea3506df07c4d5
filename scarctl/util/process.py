"""Find out whether a process exists."""

from __future__ import annotations

import os


def exists(pid: int) -> bool:
    """Return whether there is a process with this number, of any user. False for 0 and less, which are groups."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
