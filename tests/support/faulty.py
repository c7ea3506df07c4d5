"""Wrap a real blob layer so that chosen calls fail, as on a full or failing disk."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from scarctl.store.backends.base import BlobReader, Blobs, BlobWriter, Buffer, InDoubt
from scarctl.store.backends.local_files import os_error

OPERATIONS = ("writer", "write", "commit", "create_exclusive")
"""The operations of a commit, in this order; `write` several times."""
OTHERS = (
    "created",  # it is done, but whether it is durable is unknown
    "settle",
    "delete",
    "read",
    "reader",
    "read_ranges",
    "files",
    "marks",
    "folders",
    "prepare",
    "replace",
)
"""The other operations of opening, reading and collecting."""


@dataclass
class FaultyBlobs:
    """Passes all operations on to `inner`. `fail` chooses the calls that raise without doing anything."""

    inner: Blobs
    calls: Counter[str] = field(default_factory=Counter)
    """Calls so far, by operation."""
    raised: int = 0
    _plan: dict[tuple[str, int], int] = field(default_factory=dict)
    _always: dict[str, int] = field(default_factory=dict)
    _named: dict[str, tuple[str, int]] = field(default_factory=dict)
    _chance: tuple[random.Random, float, tuple[int, ...]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, operation: str, number: int = errno.EIO, *, at: Sequence[int] = (1,)) -> None:
        """Let the next, the one after that, ... (`at`, from 1) call of `operation` fail with errno `number`."""
        assert operation in (*OPERATIONS, *OTHERS)
        self._plan.update({(operation, self.calls[operation] + k): number for k in at})

    def fail_at(self, operation: str, name: str, number: int = errno.EIO) -> None:
        """Let the next call of `operation` for a file with `name` in its own fail with errno `number`."""
        assert operation in (*OPERATIONS, *OTHERS)
        self._named[operation] = name, number

    def break_down(self, operation: str, number: int) -> None:
        """Let every call of `operation` fail until `mend`."""
        assert operation in (*OPERATIONS, *OTHERS)
        self._always[operation] = number

    def decay(self, rng: random.Random, rate: float, numbers: Sequence[int]) -> None:
        """Let every call of any operation fail at random until `mend`."""
        self._chance = rng, rate, tuple(numbers)

    def mend(self) -> None:
        self._plan.clear()
        self._always.clear()
        self._named.clear()
        self._chance = None

    def _call(self, operation: str, name: str) -> None:
        number = self._due(operation)
        with self._lock:
            if number is None and (found := self._named.get(operation)) is not None and found[0] in name:
                number = self._named.pop(operation)[1]
                self.raised += 1
        if number is not None:
            raise os_error(OSError(number, os.strerror(number)), self.inner.where(name), operation)

    def _due(self, operation: str) -> int | None:
        """Return the errno with which this call fails, or None."""
        with self._lock:
            self.calls[operation] += 1
            number = self._plan.pop((operation, self.calls[operation]), self._always.get(operation))
            if number is None and self._chance is not None:
                rng, rate, numbers = self._chance
                number = rng.choice(numbers) if rng.random() < rate else None
            self.raised += number is not None
            return number

    @contextmanager
    def writer(self, name: str) -> Iterator[BlobWriter]:
        self._call("writer", name)
        with self.inner.writer(name) as out:
            yield _FaultyWriter(self, name, out)

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        self._call("create_exclusive", name)
        self.inner.create_exclusive(name, parts)
        if self._due("created") is not None:
            raise InDoubt(f"{self.inner.where(name)}: written, but it is not known whether it is durable")

    def settle(self, name: str, data: bytes) -> bool:
        if self._due("settle") is not None:
            raise InDoubt(f"{self.inner.where(name)}: it is still not known whether it is durable")
        return self.inner.settle(name, data)

    def delete(self, name: str) -> None:
        self._call("delete", name)
        self.inner.delete(name)

    def read(self, name: str, limit: int) -> bytes:
        self._call("read", name)
        return self.inner.read(name, limit)

    @contextmanager
    def reader(self, name: str) -> Iterator[BlobReader]:
        self._call("reader", name)
        with self.inner.reader(name) as file:
            yield WatchedReader(file, lambda nbytes, ranges: self._call("read_ranges", name))

    def files(self, folder: str) -> list[tuple[str, int]]:
        self._call("files", folder)
        return self.inner.files(folder)

    def marks(self, folder: str) -> list[tuple[str, str]]:
        self._call("marks", folder)
        return self.inner.marks(folder)

    def replace(self, name: str, data: bytes) -> None:
        self._call("replace", name)
        self.inner.replace(name, data)

    def folders(self, folder: str) -> list[str]:
        self._call("folders", folder)
        return self.inner.folders(folder)

    def prepare(self, folder: str, *, known: bool = False) -> None:
        self._call("prepare", folder)
        self.inner.prepare(folder, known=known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WatchedReader:
    """Passes reads on, each after a call `before(bytes, ranges)`."""

    def __init__(self, file: BlobReader, before: Callable[[int, int], None]) -> None:
        self.file, self.before, self.size = file, before, file.size

    def read(self, start: int, stop: int) -> bytes:
        self.before(stop - start, 1)
        return self.file.read(start, stop)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.before(buffer.nbytes, 1)
        self.file.read_into(start, buffer)

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.before(sum(buffer.nbytes for _, buffer in ranges), len(ranges))
        self.file.read_ranges(ranges)


@dataclass
class _FaultyWriter:
    blobs: FaultyBlobs
    name: str
    out: BlobWriter

    def write(self, buffer: Buffer) -> None:
        self.blobs._call("write", self.name)
        self.out.write(buffer)

    def commit(self) -> None:
        self.blobs._call("commit", self.name)
        self.out.commit()
