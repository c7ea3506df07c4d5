"""Test marks of partitions with a gradient: all at first, then those of the rows, however these are named."""

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
    assert numbered.marked().all()
    mask = torch.zeros(22, dtype=torch.bool)
    mask[rows] = True
    for made, given_rows in ((numbered, torch.tensor(rows, dtype=torch.int64)), (masked, mask)):
        made.clear()
        made.mark(given_rows)
        assert set(np.flatnonzero(made.marked()).tolist()) == {row // per for row in rows}
        made.mark_partitions(np.array([0, 2]))
        assert made.marked()[[0, 2]].all()
