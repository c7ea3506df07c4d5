"""Test one slot's words and arrays: what is written last decides what is there."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.state.version import NEVER, pack
from tests.arena.arenas import ALL, LAYOUT


@pytest.mark.parametrize("whole", ["", "f" * 32, "0" * 31 + "1", "8" + "0" * 31, "0123456789abcdef" * 2])
def test_a_name_of_a_whole_state_comes_back(whole: str) -> None:
    slot = Arena.anonymous(LAYOUT).slot
    slot.stamp(1, pack(1, 2), "a" * 32)
    slot.name(whole)
    assert (slot.moment, slot.head, slot.whole) == (1, pack(1, 2), whole)


def test_a_copy_counts_from_its_end_on() -> None:
    slot = Arena.anonymous(LAYOUT).slot
    slot.end(ALL, pack(1, 3), 5)
    assert slot.intact().all()
    slot.begin(ALL[2:4])
    assert np.flatnonzero(~slot.intact()).tolist() == [2, 3]
    assert slot.newest()[2] == NEVER
    assert np.flatnonzero(~slot.differs(np.full(ALL.size, 4))).tolist() == [2, 3]
    slot.end(ALL[2:4], np.array([pack(1, 4), pack(1, 6)]), np.array([6, 7]))
    assert slot.moments[1:5].tolist() == [5, 6, 7, 5]
    assert slot.newest()[3] == pack(1, 6)
    slot.reset()
    assert not slot.intact().any()
    assert (slot.version == NEVER).all()
    assert (slot.moment, slot.head, slot.whole) == (0, NEVER, "")
