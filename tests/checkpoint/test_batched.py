"""Test small groups that are compared together, against a comparison of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from scarctl.checkpoint import batched
from scarctl.checkpoint.batched import distances_of_groups
from scarctl.checkpoint.distance import distances
from scarctl.config import NORMS
from scarctl.state.layout import Group, TensorSpec
from scarctl.state.torch_dtypes import NAME_TO_TORCH, TORCH_TO_NAME

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def group_of(tensor: torch.Tensor, per_partition: int = 1) -> Group:
    return Group(
        "w", "parameter", per_partition, (TensorSpec("", TORCH_TO_NAME[tensor.dtype], tuple(tensor.shape)),)
    )


def together(
    groups: Sequence[Group], live: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], norm: str = "l2"
) -> list[np.ndarray]:
    return distances_of_groups(groups, [[t] for t in live], [[t] for t in saved], norm)


def one_by_one(
    groups: Sequence[Group], live: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], norm: str = "l2"
) -> list[np.ndarray]:
    return [distances(g, [a], [b], norm) for g, a, b in zip(groups, live, saved, strict=True)]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    shape = draw(st.sampled_from([(), (1,), (7,), (5, 3), (40, 2), (3, 2, 2), (300,), (0,), (4, 0)]))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    live, saved = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    if len(shape) > 1 and draw(st.booleans()):
        live = live.transpose(0, 1).contiguous().transpose(0, 1)
    return live, saved, draw(st.integers(1, 50))


@pytest.mark.parametrize("norm", NORMS)
@given(st.lists(tensors(), max_size=12), st.sampled_from([16, 1 << 20]))
def test_the_same_as_each_by_itself(
    norm: str, state: list[tuple[torch.Tensor, torch.Tensor, int]], at_once: int
) -> None:
    groups = [group_of(live, rows) for live, _, rows in state]
    live, saved = [a for a, _, _ in state], [b for _, b, _ in state]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_TOGETHER", at_once)
        found = together(groups, live, saved, norm)
    for mine, expected in zip(found, one_by_one(groups, live, saved, norm), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


def test_every_dtype() -> None:
    for dtype in NAME_TO_TORCH.values():
        bits = torch.arange(96, dtype=torch.uint8) % 60
        if dtype == torch.bool:
            bits = (bits % 5 == 0).to(torch.uint8)
        live = [bits.view(dtype).reshape(4, -1), bits.roll(48).view(dtype).reshape(4, -1)]
        saved = [live[1], live[1]]
        groups = [group_of(t) for t in live]
        changed, equal = together(groups, live, saved)
        np.testing.assert_allclose(changed, distances(groups[0], live[:1], saved[:1]), rtol=1e-6)
        # Doubles of such small bytes are so small that their squares are 0.
        assert changed.any() or dtype in (torch.float64, torch.complex128)
        assert not equal.any()


def test_values_that_are_not_finite_or_large_spoil_nobody_else() -> None:
    live = [torch.ones(2, 3) for _ in range(5)]
    saved = [torch.zeros(2, 3) for _ in range(5)]
    live[1][1, 2] = torch.nan
    live[2][0, 0] = saved[2][0, 0] = -torch.inf
    live[3][0] = 1e30
    groups = [group_of(t) for t in live]
    found = together(groups, live, saved)
    expected = one_by_one(groups, live, saved)
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6)
    assert np.isnan(found[1]).tolist() == [False, True]
    assert np.isfinite(found[2]).all()
    assert found[3][0] == pytest.approx(3**0.5 * 1e30)


def test_parameters_that_want_a_gradient() -> None:
    live = [torch.ones(3, requires_grad=True) for _ in range(3)]
    found = together([group_of(t) for t in live], live, [torch.zeros(3)] * 3)
    assert [f.tolist() for f in found] == [[1.0, 1.0, 1.0]] * 3
    assert all(t.grad is None for t in live)


class Counted(TorchDispatchMode):
    """Counts operations, as torch sends them to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views cost a device no work.
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def test_hundreds_of_biases_take_a_few_operations() -> None:
    live = [torch.randn(64 + i % 3) for i in range(400)]
    saved = [torch.zeros_like(t) for t in live]
    groups = [group_of(t, 100) for t in live]
    with Counted() as counted:
        found = together(groups, live, saved)
    assert counted.operations < 20
    with Counted() as apart:
        expected = one_by_one(groups, live, saved)
    assert apart.operations > 800
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    saved = [torch.randn(8, 16, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) for _ in range(50)]
    live = [t + 1 for t in saved]
    groups = [group_of(t) for t in live]
    for norm in NORMS:
        found = together(groups, [t.cuda() for t in live], saved, norm)
        for mine, expected in zip(found, one_by_one(groups, live, saved, norm), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-4)
