"""Test marks of partitions with a gradient: all are marked, however rows are named, and distances stay until then."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scarctl.checkpoint.touched import Touches
from scarctl.state.layout import TensorSpec, build_layout


def touches(per: int) -> Touches:
    layout = build_layout([("table", "parameter", (TensorSpec("", "F32", (22, 2)),))], rows={"*": per})
    return Touches(layout.groups[0], torch.device("cpu"))


@pytest.mark.parametrize("per", [1, 4])
@given(rows=st.lists(st.integers(0, 21)))
def test_rows_mark_their_partitions(per: int, rows: list[int]) -> None:
    numbered, masked = touches(per), touches(per)
    mask = torch.zeros(22, dtype=torch.bool)
    mask[rows] = True
    for made, given_rows in ((numbered, torch.tensor(rows, dtype=torch.int64)), (masked, mask)):
        made.looked()
        made.mark(given_rows)
        assert set(np.flatnonzero(made.marked()).tolist()) == {row // per for row in rows}


def test_all_are_marked_and_unknown_at_first() -> None:
    made = touches(4)
    assert made.marked().all()
    assert np.isnan(made.known).all()


def test_a_saved_copy_is_equal_and_needs_no_look_until_its_rows_move_again() -> None:
    made = touches(4)
    made.saved(np.array([1, 3]))
    assert np.flatnonzero(made.known == 0).tolist() == [1, 3]
    assert np.flatnonzero(~made.marked()).tolist() == [1, 3]
    made.mark_partitions(np.array([3]))
    made.mark(torch.tensor([21]))
    assert np.flatnonzero(~made.marked()).tolist() == [1]
    made.saved_all()
    assert not made.marked().any()
    assert (made.known == 0).all()
