"""Create, open and map the file of an arena: private, not a symbolic link, and shared between processes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.folder import folder_error
from scarctl.arena.header import not_an_arena

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
COHERENT = sys.platform == "linux"
"""Whether writes to a file appear in its maps at once, and writes to a map in the file."""


def open_file(path: Path) -> int:
    """Open an existing file. Raise FileNotFoundError, AccessDenied; Corruption unless it is a plain file."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise folder_error(error, path) from error
        raise not_an_arena(path, error.strerror or "unreadable") from error


def create_file(path: Path) -> int:
    """Create a private file. Replaces the file of a killed process. Raise AccessDenied, Unavailable."""
    try:
        path.unlink(missing_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise folder_error(error, path) from error


def map_file(fd: int, size: int, *, populate: bool = True) -> mmap.mmap:
    """Map a file of `size` bytes, shared and writable.

    populate: map all pages at once. With page faults on first touch, the first checkpoint takes several times as long.
        Leave it out if several threads fill the map, because they share the page faults.
    """
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def populate(data: NDArray[np.uint8]) -> None:
    """Map the pages of a part of a map at once, before it is written. A fault for each page takes longer.

    Changes no byte. Does nothing if the system lacks this operation.
    """
    if _MADVISE is None or not data.size:
        return
    first = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _MADVISE(first, data.ctypes.data + data.size - first, _POPULATE_WRITE)


def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


_MADVISE = _madvise()


def write_at(fd: int, at: int, data: memoryview, path: Path) -> None:
    """Write all of `data`, bytes, to the file from offset `at`. Raise Unavailable, AccessDenied."""
    try:
        while data:
            done = os.pwrite(fd, data, at)
            data, at = data[done:], at + done
    except OSError as error:
        raise folder_error(error, path) from error
