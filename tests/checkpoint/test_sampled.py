"""Test estimates of squared distances from a sample of the values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scarctl.checkpoint.distance import distances, distances_of
from scarctl.checkpoint.sampled import LEAST, NARROW, sample, sampled_squares, stride_of
from scarctl.state.layout import Group, TensorSpec


@given(values=st.integers(NARROW, 100_000), seed=st.integers(0, 2**63), turn=st.integers(0, 1000))
def test_every_value_gets_its_turn_once(values: int, seed: int, turn: int) -> None:
    turns = [sample(values, seed, turn + t) for t in range(stride_of(values))]
    assert np.array_equal(np.sort(np.concatenate(turns)), np.arange(values))


@given(values=st.integers(NARROW, 1 << 20), seed=st.integers(0, 2**63))
def test_samples_are_large_enough_ascend_and_depend_on_the_seed(values: int, seed: int) -> None:
    picked = sample(values, seed, 3)
    assert LEAST - 1 <= picked.size <= max(values // 64 + 1, 2 * LEAST)
    assert (np.diff(picked) > 0).all()
    assert picked[0] >= 0
    assert picked[-1] < values
    assert np.array_equal(picked, sample(values, seed, 3))
    assert not np.array_equal(picked, sample(values, seed + 1, 3))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.complex64]
)
def test_estimates_are_unbiased_also_of_a_short_last_partition(dtype: torch.dtype) -> None:
    """Over all turns the mean is the exact squared distance."""
    torch.manual_seed(0)
    saved = (10 * torch.randn(70, 96)).to(dtype)
    live = (saved + 10 * torch.rand(70, 96) * torch.arange(70)[:, None] / 70).to(dtype)
    group = Group("a", "parameter", 32, (TensorSpec("", "F32", (70, 96)),))
    looks = [sampled_squares(live, saved, 32, 7, turn) for turn in range(720)]
    exact = np.square(distances(group, [live], [saved]))
    np.testing.assert_allclose(np.mean(looks, axis=0), exact, rtol=2e-3)
    assert np.std(looks, axis=0).max() < 0.25 * exact.max()


def test_what_is_not_contiguous_is_sampled_in_the_same_places() -> None:
    live = torch.randn(6, 48, 40)
    saved = live + torch.rand(6, 48, 40)
    twisted = live.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not twisted.is_contiguous()
    np.testing.assert_allclose(
        sampled_squares(twisted, saved, 2, 1, 5), sampled_squares(live, saved, 2, 1, 5), rtol=1e-6
    )


def test_values_that_are_not_finite_count_where_they_are_new() -> None:
    saved = torch.zeros(4, 2048)
    saved[1] = -torch.inf
    live = saved.clone()
    live[2] = torch.nan
    live[3] = 1e30
    found = sampled_squares(live, saved, 1, 0, 0)
    assert found[:2].tolist() == [0.0, 0.0]
    assert np.isnan(found[2])
    assert 1e62 < found[3] < 1e65


@given(
    rows=st.integers(1, 40),
    per_partition=st.integers(1, 7),
    norm=st.sampled_from(["l2", "rms", "relative"]),
    data=st.data(),
)
def test_distances_of_some_partitions_are_those_of_all(
    rows: int, per_partition: int, norm: str, data: st.DataObject
) -> None:
    saved = torch.randn(rows, 3)
    live = saved + torch.rand(rows, 3)
    per_partition = min(rows, per_partition)
    group = Group("a", "parameter", per_partition, (TensorSpec("", "F32", (rows, 3)),))
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, group.partitions - 1)))), dtype=np.int64)
    found = distances_of(group, [live], [saved], ids, norm)
    np.testing.assert_allclose(found, distances(group, [live], [saved], norm)[ids], rtol=1e-5)
