"""Test commits of one process in threads: one thread computes at a time, and all wait for the disk together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from scarctl.store.backends.parallel import Helpers, Turns, idle

COUNT = 4


class Overlap:
    """Counts how many threads are inside at once."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._now -= 1


def run(work: Callable[[int], object]) -> list[object]:
    return list(Helpers().each(Turns().each(work), range(COUNT)))


def test_one_computes_at_a_time_and_all_wait_together() -> None:
    computing, waiting, together = Overlap(), Overlap(), threading.Barrier(COUNT)

    def work(number: int) -> int:
        for _ in range(3):
            with computing:
                threading.Event().wait(0.001)
            with idle(), waiting:
                together.wait(30)  # returns only if all wait at once
        return number

    assert run(work) == list(range(COUNT))
    assert (computing.most, waiting.most) == (1, COUNT)


def test_a_turn_ends_with_an_error() -> None:
    def work(number: int) -> int:
        with idle():
            pass
        if number == 1:
            raise ValueError("one")
        return number

    with pytest.raises(ValueError, match="one"):
        run(work)


def test_waiting_inside_of_waiting_and_outside_of_turns() -> None:
    with idle():
        pass

    def inner(number: int) -> int:
        with idle(), idle():
            return number

    assert run(lambda number: (run(inner), inner(number))[1]) == list(range(COUNT))
