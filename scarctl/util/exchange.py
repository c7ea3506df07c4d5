"""Exchange two paths in one step, where the system can."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path
from typing import Any

_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux 3.15


def exchange(first: Path, second: Path) -> bool:
    """Exchange two existing paths of one file system in one step. Return False if the system or file system cannot.

    Raises OSError.
    """
    if _RENAME is None:
        return False
    if not _RENAME(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def _rename() -> Any:
    if sys.platform != "linux":
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


_RENAME = _rename()
