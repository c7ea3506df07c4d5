"""Test stored bytes as numbers: every dtype as torch reads it, and distances despite overflow or NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scarctl.state.torch_dtypes import NAME_TO_TORCH
from scarctl.state.values import as_numbers, squared_changes

FLOATS = {name: dtype for name, dtype in NAME_TO_TORCH.items() if dtype.is_floating_point}


@pytest.mark.parametrize("name", FLOATS)
def test_every_float_of_one_or_two_bytes_is_the_one_that_torch_reads(name: str) -> None:
    size = FLOATS[name].itemsize
    if size > 2:
        pytest.skip("numpy's own")
    codes = np.arange(256**size, dtype=f"<u{size}").view(np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found = as_numbers(codes, name).astype(np.float64)
    expected = torch.from_numpy(codes).view(FLOATS[name]).double().numpy()
    assert np.array_equal(found, expected, equal_nan=True)


def test_complex_values_are_two_numbers_and_booleans_are_one() -> None:
    assert as_numbers(np.array([3 + 4j], "<c8").view(np.uint8), "C64").tolist() == [3.0, 4.0]
    assert as_numbers(np.array([0, 1], np.uint8), "BOOL").tolist() == [0, 1]


def changes(before: list[float], after: list[float], counts: list[int]) -> list[float]:
    rows = [np.array(values, "<f4").view(np.uint8).reshape(-1, 4) for values in (before, after)]
    return squared_changes(*rows, "F32", np.array(counts, np.int64)).tolist()


def test_changes_are_summed_per_partition() -> None:
    assert changes([0, 0, 0, 0], [1, 2, 0, 3], [2, 1, 1]) == [5.0, 0.0, 9.0]


def test_equal_infinities_are_no_change_and_nan_is_unknown() -> None:
    found = changes([math.inf, math.inf, math.nan, 1], [math.inf, -math.inf, math.nan, 2], [1, 1, 1, 1])
    assert found[0] == 0.0
    assert math.isnan(found[1])
    assert math.isnan(found[2])
    assert found[3] == 1.0


def test_integers_at_their_ends_do_not_wrap() -> None:
    ends = np.array([-128, 127], np.int8).view(np.uint8).reshape(-1, 1)
    assert squared_changes(ends[:1], ends[1:], "I8", np.array([1], np.int64)).tolist() == [255.0**2]


def test_a_partition_of_many_blocks_and_one_without_bytes() -> None:
    rows = (1 << 20) + 3
    before, after = np.zeros((rows, 1), np.uint8), np.ones((rows, 1), np.uint8)
    assert squared_changes(before, after, "U8", np.array([rows - 1, 1])).tolist() == [rows - 1, 1]
    empty = np.zeros((2, 0), np.uint8)
    assert squared_changes(empty, empty, "F32", np.array([1, 1])).tolist() == [0.0, 0.0]
