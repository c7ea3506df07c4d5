"""Test distances against a plain float64 computation, and values that are not finite."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scarctl.checkpoint import distance
from scarctl.checkpoint.distance import changed, distances
from scarctl.config import NORMS
from scarctl.errors import UsageError
from scarctl.state.layout import Group, TensorSpec
from scarctl.state.torch_dtypes import NAME_TO_TORCH, TORCH_TO_NAME

REAL = [d for d in TORCH_TO_NAME if d.is_floating_point and d.itemsize >= 2]


def group_of(tensor: torch.Tensor, per_partition: int, slots: tuple[str, ...] = ("",)) -> Group:
    specs = tuple(TensorSpec(slot, TORCH_TO_NAME[tensor.dtype], tuple(tensor.shape)) for slot in slots)
    return Group("w", "parameter", per_partition, specs)


def reference(live: torch.Tensor, saved: torch.Tensor, per_partition: int, norm: str) -> np.ndarray:
    """Compute the definition, one partition at a time."""
    rows = live.shape[0] if live.dim() else 1
    result = []
    for start in range(0, rows, per_partition):
        a = live.reshape(rows, -1)[start : start + per_partition].to(torch.complex128)
        b = saved.reshape(rows, -1)[start : start + per_partition].to(torch.complex128)
        value = float(torch.linalg.vector_norm(a - b))
        if norm == "rms":
            value /= math.sqrt(a.numel())
        if norm == "relative":
            value /= float(torch.linalg.vector_norm(b))
        result.append(value)
    return np.array(result)


@pytest.mark.parametrize("norm", NORMS)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 9),
    per_partition=st.integers(1, 45),
    chunk=st.sampled_from([1, 4, 16, 1 << 17]),
    dtype=st.sampled_from(REAL),
    seed=st.integers(0, 2**16),
)
def test_equals_the_definition(
    norm: str, rows: int, columns: int, per_partition: int, chunk: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    live = torch.randn(rows, columns, generator=generator).to(dtype)
    saved = torch.randn(rows, columns, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distance, "_CPU_CHUNK", chunk)
        found = distances(group_of(live, per_partition), [live], [saved], norm)
    np.testing.assert_allclose(found, reference(live, saved, per_partition, norm), rtol=1e-4)


@pytest.mark.parametrize("dtype", list(NAME_TO_TORCH.values()), ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    bits = torch.arange(96, dtype=torch.uint8) % 60
    if dtype == torch.bool:
        bits = (bits % 5 == 0).to(torch.uint8)
    live = bits.view(dtype).reshape(4, -1)
    saved = live.clone()
    group = group_of(live, 1)
    assert not distances(group, [live], [saved]).any()
    assert not changed(group, [live], [saved]).any()
    saved[2] = saved[1]
    assert distances(group, [live], [saved])[2] > 0
    assert changed(group, [live], [saved]).tolist() == [False, False, True, False]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    live, saved = torch.ones(shape), torch.zeros(shape)
    found = distances(group_of(live, 2), [live], [saved])
    np.testing.assert_allclose(np.square(found).sum(), live.numel())


def test_empty_groups_have_no_distances() -> None:
    empty = torch.empty(0, 4)
    assert distances(group_of(empty, 1), [empty], [empty]).shape == (0,)
    assert changed(group_of(empty, 1), [empty], [empty]).shape == (0,)
    thin = torch.empty(3, 0)
    assert distances(group_of(thin, 1), [thin], [thin]).shape == (0,)


def test_non_contiguous_live_tensors() -> None:
    live = torch.randn(6, 8).t()
    saved = torch.zeros(8, 6)
    np.testing.assert_allclose(
        distances(group_of(saved, 3), [live], [saved]), reference(live, saved, 3, "l2"), rtol=1e-6
    )


def test_values_that_are_not_finite() -> None:
    saved = torch.zeros(5, 4)
    live = saved.clone()
    live[0, 1] = math.nan
    live[1, 1] = math.inf
    live[2] = saved[2] = -math.inf  # an attention mask: equal, so unchanged
    saved[3, 0] = math.nan  # a bad copy must not hide that the live values are good
    live[3] = 2.0
    found = distances(group_of(live, 1), [live], [saved])
    assert math.isnan(found[0])
    assert math.isinf(found[1])
    assert found[2] == 0.0
    assert found[3] == 4.0
    assert found[4] == 0.0


@pytest.mark.parametrize("chunk", [1 << 20, 40])
def test_many_partitions_that_are_lost(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared again together, in pieces; the last partition is short."""
    monkeypatch.setattr("scarctl.checkpoint.distance._CPU_CHUNK", chunk)
    saved = torch.randn(32, 4)
    live = saved + 1
    live[0:9] = math.nan
    live[15] = saved[15] = math.inf
    live[31] = math.nan
    found = distances(group_of(live, 3), [live], [saved])
    assert np.flatnonzero(np.isnan(found)).tolist() == [0, 1, 2, 10]
    np.testing.assert_allclose(found[3:10], [math.sqrt(n) for n in (12, 12, 8, 12, 12, 12, 12)], rtol=1e-6)


def test_large_values_do_not_overflow() -> None:
    live, saved = torch.full((2, 2), 1e30), torch.zeros(2, 2)
    np.testing.assert_allclose(
        distances(group_of(live, 1), [live], [saved]), [math.sqrt(2) * 1e30] * 2, rtol=1e-6
    )


def test_user_norm_sees_the_slots_of_each_partition() -> None:
    live, saved = torch.randn(5, 3), torch.randn(5, 3)
    curvature = torch.rand(5, 3)

    def weighted(now: dict[str, torch.Tensor], then: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((now[""] - then[""]).square() * now["exp_avg_sq"].sqrt()).sum(dim=1).sqrt()

    group = group_of(live, 2, ("", "exp_avg_sq"))
    found = distances(group, [live, curvature], [saved, torch.zeros(5, 3)], weighted)
    every = ((live - saved).square() * curvature.sqrt()).sum(dim=1)
    expected = [float(every[a : a + 2].sum().sqrt()) for a in (0, 2, 4)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("slot", ["exp_avg_sq", "square_avg", "sum"])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_curvature_weighs_changes_by_squared_gradients(slot: str, by_row: bool, dtype: torch.dtype) -> None:
    name = TORCH_TO_NAME[dtype]
    specs = (TensorSpec("", name, (5, 3)), TensorSpec(slot, "F32", (5,) if by_row else (5, 3)))
    group = Group("w", "parameter", 2, specs)
    rng = np.random.default_rng(0)
    live = [
        torch.from_numpy(rng.normal(size=(5, 3))).to(dtype),
        torch.from_numpy(rng.random(specs[1].shape)).float(),
    ]
    live[1][0] = 0.0  # it never had a gradient
    saved = [torch.zeros_like(live[0]), torch.zeros_like(live[1])]
    weight = live[1].double().sqrt() + 1e-8
    rows = (live[0].double().square() * (weight[:, None] if by_row else weight)).sum(dim=1)
    wanted = [float(rows[first : first + 2].sum().sqrt()) for first in (0, 2, 4)]
    assert distances(group, live, saved, distance.curvature) == pytest.approx(wanted, rel=1e-5)


def test_curvature_keeps_what_has_no_gradient_in_the_ranking_and_is_l2_without_slots() -> None:
    live, saved = torch.tensor([[1.0], [0.0]]), torch.zeros(2, 1)
    found = distance.curvature({"": live, "exp_avg_sq": saved}, {"": saved, "exp_avg_sq": saved})
    assert found[0] > 0
    assert found[1] == 0
    assert distance.curvature({"": live}, {"": saved}).tolist() == [1.0, 0.0]


def test_user_norm_of_the_wrong_shape_is_refused() -> None:
    live = torch.ones(4, 2)
    with pytest.raises(UsageError, match="one distance per partition"):
        distances(group_of(live, 1), [live], [live], lambda now, then: now[""])
    with pytest.raises(UsageError, match="unknown norm"):
        distances(group_of(live, 1), [live], [live], "l3")


def test_negative_zero_and_nan_bits_count_as_changes() -> None:
    live, saved = torch.zeros(3, 1), torch.zeros(3, 1)
    live[1] = -0.0
    live[2] = saved[2] = math.nan
    assert changed(group_of(live, 1), [live], [saved]).tolist() == [False, True, False]


def test_no_temporary_of_the_tensors_size() -> None:
    live = torch.ones(16384, 1024)
    saved = torch.zeros_like(live)
    group = group_of(live, 16)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        distances(group, [live], [saved])
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= live.nbytes / 16
    tracemalloc.start()
    distances(group, [live], [saved])
    assert tracemalloc.get_traced_memory()[1] < live.nbytes / 16
    tracemalloc.stop()
