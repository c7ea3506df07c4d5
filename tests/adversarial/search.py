"""Search all states of a transition system, breadth first, for one that breaks a condition."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

World = TypeVar("World", bound=Hashable)


class Broken(Exception):
    """A condition that must hold at every moment does not hold."""


@dataclass(frozen=True)
class Result:
    """Numbers of states and of steps between them; the violation ("" without one), and the shortest way to it."""

    states: int
    steps: int
    broken: str = ""
    trace: tuple[str, ...] = ()


def search(start: World, following: Callable[[World], Iterable[tuple[str, World]]]) -> Result:
    """Visit the states that can be reached from `start`, up to the first for which `following` raises Broken.

    A state is known by its hash, because there may be millions.
    """
    seen: dict[int, tuple[int, str]] = {hash(start): (0, "")}
    waiting, steps = deque([(hash(start), start)]), 0
    while waiting:
        key, world = waiting.popleft()
        try:
            for what, after in following(world):
                steps += 1
                if (new := hash(after)) not in seen:
                    seen[new] = key, what
                    waiting.append((new, after))
        except Broken as error:
            trace = []
            while key:
                key, what = seen[key]
                trace.append(what)
            return Result(len(seen), steps, str(error), tuple(reversed(trace[:-1])))
    return Result(len(seen), steps)
