"""Test helpers for arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scarctl.util.arrays import adjacent, distinct, places, union

ascending = st.sets(st.integers(0, 40)).map(lambda found: np.array(sorted(found), np.int64))


@given(st.lists(st.integers(-2, 2)))
def test_the_different_values_ascend(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


@given(ascending, ascending)
def test_a_union_is_that_of_numpy(first: np.ndarray, second: np.ndarray) -> None:
    found = union(first, second)
    assert found.tolist() == np.union1d(first, second).tolist()
    assert found.dtype == np.int64


@given(ascending, st.data())
def test_places_pick_what_was_looked_for(among: np.ndarray, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, among.size))
    run = among[first : data.draw(st.integers(first, among.size))]
    assert isinstance(places(among, run), slice)
    assert among[places(among, run)].tolist() == run.tolist()
    some = among[
        data.draw(st.lists(st.booleans(), min_size=among.size, max_size=among.size).map(np.array)) == 1
    ]
    assert among[places(among, some)].tolist() == some.tolist()


@given(ascending)
def test_adjacent_places_are_a_slice(at: np.ndarray) -> None:
    found = np.arange(64)[adjacent(at)]
    assert found.tolist() == at.tolist()
    run = bool(at.size) and at.tolist() == list(range(at[0], at[-1] + 1))
    assert isinstance(adjacent(at), slice) == run
