"""Test indices of partitions' rows: exactly these rows, and a slice if they are adjacent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.state.layout import TensorSpec, build_layout, rows_of
from scarctl.util.arrays import take_rows

LAYOUT = build_layout(
    [(name, "parameter", (TensorSpec("", "U8", (22, 2)),)) for name in ("a", "b")], rows={"*": 4}
)
"""Two groups with six partitions each, the last of two rows."""


@pytest.mark.parametrize("g", [0, 1])
@given(chosen=st.sets(st.integers(0, 5)))
def test_they_pick_the_rows_of_the_partitions(g: int, chosen: set[int]) -> None:
    ids = np.array(sorted(chosen), dtype=np.int64) + int(LAYOUT.base[g])
    index = rows_of(LAYOUT, g, ids)
    expected = [row for i in sorted(chosen) for row in range(4 * i, min(4 * i + 4, 22))]
    assert np.arange(22)[index].tolist() == expected
    adjacent = not expected or expected[-1] - expected[0] == len(expected) - 1
    assert isinstance(index, slice) is adjacent, "a view where that is possible"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6))
def test_ascending_ranges(gaps: list[tuple[int, int]]) -> None:
    at, starts, stops = 0, [], []
    for gap, length in gaps:
        starts.append(at + gap)
        at += gap + length
        stops.append(at)
    index = take_rows(np.array(starts, np.int64), np.array(stops, np.int64))
    expected = [row for start, stop in zip(starts, stops, strict=True) for row in range(start, stop)]
    assert np.arange(100)[index].tolist() == expected
