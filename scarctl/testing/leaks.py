"""Find leaks of a training in its process: threads, files, handlers, objects."""

from __future__ import annotations

import gc
import signal
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GRACE = 5.0
"""Seconds within which an ending thread must have ended."""


def residue(arena_dir: Path) -> Counter[str]:
    """Count threads, open files, collector callbacks and arena files. Two counts can be subtracted."""
    found: Counter[str] = Counter()
    found.update(f"thread {thread.name}" for thread in threading.enumerate())
    found["open files"] = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    found["callbacks of the collector"] = len(gc.callbacks)
    found.update(f"file {path.name}" for path in arena_dir.rglob("*") if path.is_file())
    return found


def handlers() -> dict[str, object]:
    """Return the handlers of the signals that a session or framework may handle."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return {number.name: signal.getsignal(number) for number in numbers}


def left_behind(before: Counter[str], arena_dir: Path, what: str = "") -> list[str]:
    """Return the counts that have increased since `before`, after threads had time to end. what: part of the names."""
    deadline = time.monotonic() + GRACE
    while True:
        more = residue(arena_dir) - before
        found = [f"{count} x {name}" for name, count in more.items() if what in name]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def survivors(references: dict[str, weakref.ref[Any]]) -> list[str]:
    """Return the names of the objects that survive garbage collection, with the types of their referrers."""
    for _ in range(3):  # finalizers release objects for the next round
        gc.collect()
    alive = {name: item for name, reference in references.items() if (item := reference()) is not None}
    return [f"{name} (referred to by {', '.join(_holders(item, alive))})" for name, item in alive.items()]


def _holders(item: object, mine: object) -> list[str]:
    holders = (holder for holder in gc.get_referrers(item) if holder is not mine)
    return sorted(
        {type(holder).__qualname__ for holder in holders if not isinstance(holder, types.FrameType)}
    )


def referred_to(owner: object) -> dict[str, weakref.ref[Any]]:
    """Return weak references to an instance's attributes, and to the items of dicts and lists among them."""
    return dict(_references(owner))


def _references(owner: object) -> Iterator[tuple[str, weakref.ref[Any]]]:
    for name, value in vars(owner).items():
        items: dict[Any, Any] = {}
        if isinstance(value, dict):
            items = value
        elif isinstance(value, list | tuple):
            items = dict(enumerate(value))
        for key, item in [("", value), *((f"[{key!r}]", item) for key, item in items.items())]:
            # Classes, functions and modules belong to the program.
            if isinstance(item, type | types.FunctionType | types.ModuleType):
                continue
            try:
                yield f"{name}{key}", weakref.ref(item)
            except TypeError:
                continue  # a plain value
