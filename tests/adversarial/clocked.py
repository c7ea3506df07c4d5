"""Measure the time of each operation of a store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clocked:
    """Passes all operations on, and measures those of a remote store."""

    inner: Any
    worst: dict[str, float] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name in (
            "read",
            "files",
            "folders",
            "has",
            "create_exclusive",
            "settle",
            "delete",
            "top",
            "uploads",
        ):
            return self.timed(name, found)
        return found

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return call(*args, **kwargs)
            finally:
                self.worst[name] = max(self.worst.get(name, 0.0), time.monotonic() - started)
                self.calls[name] += 1

        return clocked

    @contextmanager
    def reader(self, name: str) -> Iterator[Any]:
        opened = self.inner.reader(name)
        file = self.timed("reader", opened.__enter__)()
        try:
            yield _ClockedFile(self, file, ("read", "read_into"))
        finally:
            opened.__exit__(None, None, None)

    @contextmanager
    def writer(self, name: str) -> Iterator[Any]:
        opened = self.inner.writer(name)
        out = opened.__enter__()
        try:
            yield _ClockedFile(self, out, ("write", "commit"))
        except BaseException as error:
            if not self.timed("give up", opened.__exit__)(type(error), error, error.__traceback__):
                raise
        else:
            self.timed("writer.close", opened.__exit__)(None, None, None)


@dataclass
class _ClockedFile:
    owner: Clocked
    file: Any
    timed: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.file, name)
        return self.owner.timed(f"file.{name}", found) if name in self.timed else found
