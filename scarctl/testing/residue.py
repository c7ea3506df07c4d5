"""What a training may leave behind in its process."""

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
"""Seconds that a thread which was told to end may take."""


def residue(arena_dir: Path) -> Counter[str]:
    """What there is in this process and in the arenas' folder, counted: two of them can be subtracted."""
    found: Counter[str] = Counter()
    found.update(f"thread {thread.name}" for thread in threading.enumerate())
    found["open files"] = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    found["callbacks of the collector"] = len(gc.callbacks)
    found.update(f"file {path.name}" for path in arena_dir.rglob("*") if path.is_file())
    return found


def handlers() -> dict[str, object]:
    """What handles the signals that something may want to be told of."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return {number.name: signal.getsignal(number) for number in numbers}


def left_behind(before: Counter[str], arena_dir: Path, what: str = "") -> list[str]:
    """What there is more of than before, once threads that are about to end have ended; of names with `what`."""
    deadline = time.monotonic() + GRACE
    while True:
        more = residue(arena_dir) - before
        found = [f"{count} x {name}" for name, count in more.items() if what in name]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def survivors(references: dict[str, weakref.ref[Any]]) -> list[str]:
    """Names of the objects that the collector does not free, with the types of what refers to them."""
    for _ in range(3):  # what a finalizer lets go of goes in the next round
        gc.collect()
    alive = {name: item for name, reference in references.items() if (item := reference()) is not None}
    return [f"{name} (referred to by {', '.join(_holders(item, alive))})" for name, item in alive.items()]


def _holders(item: object, mine: object) -> list[str]:
    holders = (holder for holder in gc.get_referrers(item) if holder is not mine)
    return sorted(
        {type(holder).__qualname__ for holder in holders if not isinstance(holder, types.FrameType)}
    )


def referred_to(owner: object) -> dict[str, weakref.ref[Any]]:
    """Weak references to the values of an instance's attributes, and to what dicts and lists among them hold."""
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
