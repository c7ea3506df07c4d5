"""A blob layer over a real one that fails at chosen calls, as a full or failing disk does."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from scarctl.store import Blobs
from scarctl.store.blob import BlobWriter, Buffer, os_error

OPERATIONS = ("writer", "write", "commit", "create_exclusive")
"""What a commit does, in this order; `write` several times."""


@dataclass
class FaultyBlobs:
    """Passes everything on to `inner`. `fail` chooses the calls that raise instead; nothing of those is done."""

    inner: Blobs
    calls: Counter[str] = field(default_factory=Counter)
    """Calls so far, by operation."""
    raised: int = 0
    _plan: dict[tuple[str, int], int] = field(default_factory=dict)
    _always: dict[str, int] = field(default_factory=dict)

    def fail(self, operation: str, number: int = errno.EIO, *, at: Sequence[int] = (1,)) -> None:
        """The next, the one after that, ... (`at`, from 1) call of `operation` fails with errno `number`."""
        assert operation in OPERATIONS
        self._plan.update({(operation, self.calls[operation] + k): number for k in at})

    def break_down(self, operation: str, number: int) -> None:
        """From now on every call of `operation` fails, until `mend`."""
        assert operation in OPERATIONS
        self._always[operation] = number

    def mend(self) -> None:
        self._plan.clear()
        self._always.clear()

    def _call(self, operation: str, name: str) -> None:
        self.calls[operation] += 1
        number = self._plan.pop((operation, self.calls[operation]), self._always.get(operation))
        if number is not None:
            self.raised += 1
            raise os_error(OSError(number, os.strerror(number)), self.inner.where(name), operation)

    @contextmanager
    def writer(self, name: str) -> Iterator[BlobWriter]:
        self._call("writer", name)
        with self.inner.writer(name) as out:
            yield _FaultyWriter(self, name, out)

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        self._call("create_exclusive", name)
        self.inner.create_exclusive(name, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


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
