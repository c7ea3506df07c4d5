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


@given(
    st.sets(st.integers(0, 10), min_size=2),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    st.booleans(),
)
@settings(deadline=None)
def test_partitions_gathered_by_numpy(
    chosen: set[int], per: int, dtype: torch.dtype, shape: tuple[int, ...], transposed: bool
) -> None:
    """Of 11 partitions the last may be shorter."""
    rows = 11 * per - per // 2
    starts = np.array(sorted(chosen)) * per
    stops = np.minimum(starts + per, rows)
    source = torch.randint(0, 2, (rows, *shape)).to(dtype)
    if transposed and len(shape) == 1:
        source = source.t().clone(memory_format=torch.contiguous_format).t()
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    copy_rows(target, source, starts, stops, counted=False)
    picked = np.concatenate([np.arange(*pair) for pair in zip(starts, stops, strict=True)])
    expected[picked] = source[picked]
    assert torch.equal(target, expected)
    live = torch.zeros_like(source)
    copy_rows(live, source, starts, stops)
    assert live._version > 0, "torch has to count what training may see"


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
