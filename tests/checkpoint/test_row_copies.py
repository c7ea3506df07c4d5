"""Rows that are copied in few calls, as to and from a GPU, are those that are copied one run after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scarctl.checkpoint.row_copies import copy_rows, copy_runs, equal, wait_for

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@given(st.sets(st.integers(0, 29), min_size=1), st.integers(1, 3))
@settings(deadline=None)
def test_several_runs(rows: set[int], width: int) -> None:
    chosen = np.array(sorted(rows))
    breaks = np.flatnonzero(np.diff(chosen) != 1)
    starts, stops = chosen[np.r_[0, breaks + 1]], chosen[np.r_[breaks, chosen.size - 1]] + 1
    source = torch.arange(30.0 * width).view(30, width)
    target = torch.full((30, width), -1.0)
    copy_runs(target, source, starts, stops)
    expected = torch.full((30, width), -1.0)
    expected[chosen] = source[chosen]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [2, 1 << 14])
@pytest.mark.parametrize("ranges", [[(0, 7)], [(0, 2), (2, 3), (5, 6)], [(1, 2), (4, 7)]])
def test_to_a_device_and_back(device: str, width: int, ranges: list[tuple[int, int]]) -> None:
    starts, stops = np.array(ranges).T
    parameter = nn.Parameter(torch.randn(7, width, device=device))
    host = torch.zeros(7, width)
    copy_rows(host, parameter.detach(), starts, stops)
    wait_for([parameter.device])
    rows = np.concatenate([np.arange(*one) for one in ranges])
    assert torch.equal(host[rows], parameter.detach().cpu()[rows])
    assert host.count_nonzero() == rows.size * width
    live = nn.Parameter(torch.zeros(7, width, device=device))
    with torch.no_grad():
        copy_rows(live, host, starts, stops)
    wait_for([live.device])
    assert torch.equal(live.detach().cpu(), host)


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_compared_together(device: str) -> None:
    saved = [torch.randn(3, 4), torch.randn(5).to(torch.bfloat16), torch.randn(2, 2)]
    live = [tensor.to(device, copy=True) for tensor in saved]
    assert equal(live, saved)
    assert equal([live[0], saved[2]], [saved[0], saved[2]]), "a model may be on several devices"
    live[2][1, 1] += 1
    assert not equal(live, saved)
    live[2][1, 1] = torch.nan
    assert not equal(live, [*saved[:2], live[2].cpu()])
