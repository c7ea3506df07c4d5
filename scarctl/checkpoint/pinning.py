"""Pin the arena's memory, so that a GPU reads and writes copies directly, at the speed of the bus.

Otherwise the driver copies everything once more, through its own buffers. The arena is shared memory, so it is
registered in place instead of being allocated pinned, while an engine is open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.checkpoint.streams import ignore_captures

log = logging.getLogger("scarctl")
Memory = NDArray[np.uint8]

_PORTABLE = 1
"""cudaHostRegisterPortable: valid for all GPUs of the process."""


class Pinning:
    """Registers one piece of memory with CUDA, in the background, and unregisters it before it is unmapped."""

    def __init__(self, memory: Memory) -> None:
        """memory: uint8 of shape (bytes,), which must stay mapped until `end`."""
        self._memory = memory
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def begin(self, device: torch.device) -> None:
        """Start pinning, for a process that uses this GPU. Later calls do nothing."""
        if self._thread is not None or not self._memory.size:
            return
        # In a thread of its own. Gigabytes take a second, and CUDA keeps a failed call's error for the thread that made
        # it, where the next kernel would raise it.
        pinned = threading.Event()
        args = (self._memory, device, pinned)
        thread = threading.Thread(target=_register, args=args, name="scarctl-pin", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # the interpreter ends, and takes no new threads: this is the last copy
        self._thread = thread
        self._end = weakref.finalize(self, _unregister, self._memory, device, thread, pinned, os.getpid())
        self._end.atexit = False  # a session's last copy, at exit as well, comes before its `end`

    def end(self) -> None:
        """Wait until the memory is pinned or was refused, and unregister it permanently."""
        if self._end is not None:
            self._end()


def _register(memory: Memory, device: torch.device, pinned: threading.Event) -> None:
    ignore_captures()
    with _runtime(device) as cuda:
        error = int(cuda.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
    if error:
        log.warning(
            "the arena of %d MB cannot be pinned (CUDA error %d): checkpoints are as safe, and their copies slower. "
            "CUDA pins no file on a disk: choose an arena_dir in memory, such as /dev/shm, or pin_memory=False",
            memory.nbytes >> 20,
            error,
        )
    else:
        pinned.set()


def _unregister(
    memory: Memory, device: torch.device, thread: threading.Thread, pinned: threading.Event, pid: int
) -> None:
    if os.getpid() != pid:
        return  # a forked child has neither the thread nor CUDA
    thread.join()
    if pinned.is_set():
        with _runtime(device) as cuda:
            error = int(cuda.cudaHostUnregister(memory.ctypes.data))
        if error:
            log.warning("the arena could not be unpinned (CUDA error %d)", error)


@contextlib.contextmanager
def _runtime(device: torch.device) -> Iterator[Any]:
    # A thread's first GPU is number 0, which training may not use: the call would make a context there.
    with torch.cuda.device(device):
        yield torch.cuda.cudart()  # type: ignore[no-untyped-call]
