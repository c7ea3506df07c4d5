"""Wrap a real blob layer so that every byte and every file takes as long as on a slow store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scarctl.store.backends.base import Blobs, BlobWriter, Buffer


class ThrottledBlobs:
    """Passes all operations on to `inner`; written data wait for their turn on one line of `bytes_per_second`.

    seconds: additional time of every file. sleep: how to wait. With `stuck` set nothing is written until it is
    cleared.
    """

    def __init__(
        self,
        inner: Blobs,
        bytes_per_second: float,
        *,
        seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self.bytes_per_second = bytes_per_second
        self.seconds = seconds
        self.stuck = threading.Event()
        self._sleep = sleep
        self._line = threading.Lock()

    def pass_through(self, nbytes: int, seconds: float = 0.0) -> None:
        """Wait as long as so many bytes take."""
        with self._line:
            self._sleep(nbytes / self.bytes_per_second + seconds)
        while self.stuck.is_set():
            time.sleep(0.01)

    @contextmanager
    def writer(self, name: str) -> Iterator[BlobWriter]:
        with self.inner.writer(name) as out:
            yield _ThrottledWriter(self, out)
            self.pass_through(0, self.seconds)

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        self.pass_through(sum(memoryview(part).nbytes for part in parts), self.seconds)
        self.inner.create_exclusive(name, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _ThrottledWriter:
    def __init__(self, blobs: ThrottledBlobs, out: BlobWriter) -> None:
        self._blobs = blobs
        self._out = out

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        for at in range(0, view.nbytes, 1 << 20):
            part = view[at : at + (1 << 20)]
            self._blobs.pass_through(part.nbytes)
            self._out.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)
