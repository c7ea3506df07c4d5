"""Test the plan of an evacuation: its order, and commits small enough that the last one ends before the deadline."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scarctl.policy.evacuation import FIRST, FIRST_KNOWN, GROWTH, LEAST, SMALL, Pace, fitting, order


def test_what_changed_most_per_byte_goes_first() -> None:
    distance = np.array([1.0, 4.0, 3.0, 0.0], dtype=np.float32)
    nbytes = np.array([1, 100, 9, 1])
    assert order(distance, nbytes, np.zeros(4, dtype=bool)).tolist() == [0, 2, 1, 3]


def test_what_the_store_lacks_goes_before_all_and_then_what_nobody_measured() -> None:
    distance = np.array([9.0, np.nan, np.nan, 0.0, np.inf], dtype=np.float32)
    missing = np.array([False, False, True, True, False])
    assert order(distance, np.ones(5, dtype=np.int64), missing).tolist() == [2, 3, 1, 4, 0]


def test_a_commit_takes_what_fits_and_one_large_partition_alone() -> None:
    nbytes = np.array([5, 5, 20, 1])
    assert fitting(nbytes, 12, math.inf).tolist() == [0, 1]
    assert fitting(nbytes[2:], 12, math.inf).tolist() == [0]
    assert fitting(nbytes[2:], 12, 15).tolist() == [1], (
        "the large one would be cut off, a later one would not"
    )
    assert fitting(nbytes[2:3], 12, 15).size == fitting(nbytes[:0], 12, 15).size == 0


def test_nothing_known_begins_small_and_grows_with_what_was_measured() -> None:
    pace = Pace()
    assert pace.room(25.0) == (FIRST, math.inf)
    pace.add(FIRST, 0.001)
    assert pace.room(25.0)[0] == GROWTH * FIRST, "one small commit says little about a large one"


def test_a_tiny_commit_does_not_make_a_slow_store() -> None:
    pace = Pace()
    pace.add(16, 0.2)
    assert pace.seconds(40_000) < 1
    assert pace.room(25.0)[0] == GROWTH * SMALL


def paced(bandwidth: float, fixed: float = 0.0) -> Pace:
    """Return a pace that has measured two commits of this bandwidth and fixed time."""
    pace = Pace()
    for seconds in (1.0, 5.0):
        pace.add(int(bandwidth * seconds), fixed + seconds)
    return pace


def test_a_known_speed_is_believed_a_little() -> None:
    usual, most = Pace(paced(2e5)).room(16.0)
    assert usual == pytest.approx(200_000 - LEAST * 2e5)  # a sixteenth of the time at 0.2 MB/s
    assert most == pytest.approx((16 * 0.8 - LEAST) * 2e5)
    assert Pace(paced(1e9)).room(16.0)[0] == FIRST_KNOWN


def test_the_newest_commits_count() -> None:
    pace = paced(1e9)
    for _ in range(40):
        pace.add(1_000_000, 1.0)
    assert pace.seconds(10_000_000) > 9.0


def test_no_commit_begins_that_may_end_too_late() -> None:
    pace = Pace()
    pace.add(1000, 2.0)
    pace.add(10_000_000, 3.0)
    assert pace.seconds(0) == pytest.approx(2.0, abs=0.01)
    assert pace.room(2.4) == (0, 0)
    assert pace.room(0.0) == pace.room(-3.0) == Pace().room(0.0) == (0, 0)
    usual, most = pace.room(10.0)
    assert pace.seconds(usual) <= 8.0
    assert pace.seconds(int(most)) <= 8.0 + 1e-6


def _run(
    seconds: Callable[[int], float], total: int, deadline: float, pace: Pace
) -> tuple[int, float, list[int]]:
    """Save `total` bytes in small partitions to a store whose commits take so long; return bytes, time, commits."""
    now, done, sizes = 0.0, 0, []
    while total - done > 0:
        room, _ = pace.room(deadline - now)
        nbytes = min(room, total - done)
        if not nbytes:
            break
        took = seconds(nbytes)
        now += took
        pace.add(nbytes, took)
        done += nbytes
        sizes.append(nbytes)
    return done, now, sizes


@given(
    bandwidth=st.floats(1e6, 1e10),
    fixed=st.floats(0.0, 0.5),
    deadline=st.floats(5.0, 120.0),
    total=st.integers(1, 1 << 34),
    known=st.booleans(),
)
def test_a_steady_store_is_used_well_and_never_beyond_the_deadline(
    bandwidth: float, fixed: float, deadline: float, total: int, known: bool
) -> None:
    assume(fixed <= deadline / 20)  # beyond that most of the time is the fixed part of commits

    def seconds(nbytes: int) -> float:
        return fixed + nbytes / bandwidth

    pace = Pace(paced(bandwidth, fixed)) if known else Pace()
    done, now, sizes = _run(seconds, total, deadline, pace)
    assert now <= deadline
    assert len(sizes) < 200
    possible = min(total, int((deadline - fixed) * bandwidth))
    assert done >= 0.3 * possible or done >= 5e7, (done, possible, sizes)
    if seconds(total) < deadline / 8:
        assert done == total


@given(factor=st.floats(0.02, 1.0), at=st.floats(0.0, 1.0))
def test_a_store_that_loses_its_speed_costs_one_commit(factor: float, at: float) -> None:
    now = 0.0

    def seconds(nbytes: int) -> float:
        return 0.05 + nbytes / (1e8 * (factor if now >= at * 30 else 1.0))

    pace, done = Pace(), 0
    while (room := pace.room(30 - now)[0]) > 0:
        took = seconds(room)
        now += took
        if now > 30:
            break
        pace.add(room, took)
        done += room
    assert done >= FIRST
