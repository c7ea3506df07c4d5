"""Test calls for many items in several threads."""

from __future__ import annotations

import threading

import pytest

from scarctl.util.worker import run_all


@pytest.mark.parametrize("threads", [1, 3])
def test_every_item_is_taken_once(threads: int) -> None:
    taken: list[int] = []
    run_all(taken.append, range(100), threads)
    assert sorted(taken) == list(range(100))
    run_all(taken.append, [], threads)
    assert len(taken) == 100


def test_several_threads_take_part() -> None:
    meeting = threading.Barrier(3, timeout=30)
    run_all(lambda _: meeting.wait(), range(3), 3)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_is_raised_when_all_have_ended(threads: int) -> None:
    taken: list[int] = []

    def call(n: int) -> None:
        taken.append(n)
        if n == 5:
            raise IndexError(n)

    with pytest.raises(IndexError, match="5"):
        run_all(call, range(1000), threads)
    assert len(taken) < 1000
    assert not [thread for thread in threading.enumerate() if thread.name == "scarctl-helper"]
