"""Test splitmix64 against the values that its authors' program prints, and against integers without a width."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scarctl.util.splitmix import MASK, mix64, mixed, splitmix64
from tests.support.splitmix import mix

PRINTED = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
"""The first values from state 0."""


def test_the_values_are_those_of_its_authors() -> None:
    assert splitmix64(np.arange(1, 4), 0).tolist() == PRINTED


@given(st.integers(-(1 << 70), 1 << 70), st.lists(st.integers(0, 1 << 62), min_size=1))
def test_any_state_and_index(state: int, index: list[int]) -> None:
    ids = np.array(index)
    found = splitmix64(ids, state)
    assert found.tolist() == [mix(i * 0x9E3779B97F4A7C15 + state & MASK) for i in index]
    assert ids.tolist() == index, "it is not changed"
    assert mixed(state) == mix(state & MASK)


def test_it_mixes_in_place() -> None:
    z = np.array([5], np.uint64)
    assert mix64(z) is z
    assert z.tolist() == [mix(5)]
