"""Test comparing checkpoints: what differs, by how much, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from scarctl.formats.source import Source
from scarctl.ops import diff as module
from scarctl.ops.diff import Comparison, Tolerance, compare
from scarctl.ops.measure import measure, norm_of
from scarctl.state.layout import TensorSpec
from scarctl.state.torch_dtypes import name_of
from scarctl.util.arrays import Bytes


class Held:
    """Tensors in memory as a source."""

    where, format = "memory", "memory"

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.problems: list[str] = []
        self.tensors = tensors
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec("", name_of(t.dtype, name), tuple(t.shape))
            for name, t in sorted(tensors.items())
        }

    def read(self, name: str, start: int, stop: int) -> Bytes:
        data: Bytes = self.tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        return data[start:stop]


def diff(a: Source, b: Source, **options: Any) -> Comparison:
    return compare(a, b, **options)


def one(a: torch.Tensor, b: torch.Tensor, **options: Any) -> module.Difference:
    (found,) = diff(Held(w=a), Held(w=b), **options).differences
    return found


@pytest.mark.parametrize("block", [8, 4 << 20])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32]
)
def test_the_change_is_measured_as_torch_measures_it(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    generator = torch.Generator().manual_seed(3)
    a = (10 * torch.randn(40, 3, generator=generator)).to(dtype)
    b = a.clone()
    b[7, 1], b[30, 2] = b[7, 1].double() + 2, b[30, 2].double() - 3
    found, change = one(a, b), (b.double() - a.double()).flatten()
    assert found.kind == "values"
    assert found.changed == 2
    assert found.change == pytest.approx(float(change.norm()))
    assert found.norm == pytest.approx(float(a.double().norm()))
    assert found.max_abs == pytest.approx(float(change.abs().max()))
    assert found.relative == pytest.approx(found.change / found.norm)


def test_equal_ones_are_equal() -> None:
    nan = torch.tensor([1.0, math.nan, math.inf])
    found = diff(
        Held(a=nan, e=torch.zeros(0), s=torch.tensor(1)),
        Held(a=nan.clone(), e=torch.zeros(0), s=torch.tensor(1)),
    )
    assert (found.equal, found.tensors, found.bytes) == (True, 3, 20)


def test_missing_shape_and_dtype() -> None:
    a = Held(only=torch.ones(1), shape=torch.ones(2, 3), dtype=torch.tensor([1.0, 1 / 3]), same=torch.ones(1))
    b = Held(
        new=torch.ones(1),
        shape=torch.ones(3, 2),
        dtype=torch.tensor([1.0, 1 / 3]).bfloat16(),
        same=torch.ones(1),
    )
    found = {x.name: x for x in diff(a, b).differences}
    assert {name: x.kind for name, x in found.items()} == {
        "only": "only in A", "new": "only in B", "shape": "shape", "dtype": "dtype",
    }  # fmt: skip
    assert found["dtype"].changed == 1
    assert found["dtype"].max_abs == pytest.approx(
        abs(1 / 3 - float(torch.tensor(1 / 3).bfloat16())), rel=1e-3
    )
    # The same values in another dtype still differ.
    assert one(torch.ones(3), torch.ones(3).half()).changed == 0


def test_what_stopped_being_finite_comes_first() -> None:
    a = Held(
        big=torch.ones(4),
        nan=torch.ones(4),
        inf=torch.ones(4),
        gone=torch.tensor([math.nan, 1.0]),
        z=torch.ones(2),
    )
    b = Held(
        big=torch.full((4,), 100.0),
        nan=torch.tensor([math.nan, math.nan, 1.0, 1.0]),
        inf=torch.tensor([1.0, -math.inf, 1.0, 1.0]),
        gone=torch.tensor([1.0, 1.0]),
        z=torch.tensor([1.0, 1.5]),
    )
    found = diff(a, b)
    assert [x.name for x in found.differences] == ["nan", "inf", "big", "z", "gone"]
    assert [(x.nan, x.inf, x.changed) for x in found.differences] == [
        (2, 0, 2),
        (0, 1, 1),
        (0, 0, 4),
        (0, 0, 1),
        (0, 0, 1),
    ]
    assert found.to_json()["nan_appeared"] == 2


def test_tolerances() -> None:
    a, b = torch.tensor([1.0, 100.0, math.inf, math.nan]), torch.tensor([1.001, 100.1, math.inf, math.nan])
    assert one(a, b).changed == 2
    assert one(a, b, tolerance=Tolerance(atol=0.01)).changed == 1
    assert diff(Held(w=a), Held(w=b), tolerance=Tolerance(rtol=0.0011)).equal
    assert one(a, torch.tensor([1.0, 100.0, -math.inf, math.nan]), tolerance=Tolerance(1e9, 1e9)).changed == 1
    assert one(a, torch.tensor([1.0, 100.0, 1.0, math.nan]), tolerance=Tolerance(1e9, 1e9)).changed == 1
    assert one(a, torch.tensor([1.0, math.nan, math.inf, math.nan]), tolerance=Tolerance(1e9, 1e9)).nan == 1


def test_every_byte_counts_without_a_tolerance() -> None:
    found = one(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.changed, found.change) == (1, 0.0)
    assert diff(
        Held(w=torch.tensor([0.0])), Held(w=torch.tensor([-0.0])), tolerance=Tolerance(atol=1e-30)
    ).equal
    large = one(torch.tensor([2**62]), torch.tensor([2**62 + 1]))
    assert (large.changed, large.max_abs) == (1, 1.0)


def test_norms_neither_overflow_nor_vanish() -> None:
    for scale in (1e-200, 1e200):
        a = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
        found = one(a, 2 * a)
        assert found.norm == pytest.approx(5 * scale)
        assert found.relative == pytest.approx(1.0)
    a = torch.full((2,), 1.7e308, dtype=torch.float64)
    assert one(a, -a).to_json()["max_abs"] is None, "too large for JSON"
    assert one(torch.zeros(2), torch.ones(2)).to_json()["relative"] is None
    assert norm_of(np.empty(0)) == 0.0


def test_complex_and_bool() -> None:
    a = torch.tensor([1 + 2j, 3 - 1j])
    b = torch.tensor([1 + 2j, 3 + 1j])
    assert (one(a, b).changed, one(a, b).max_abs) == (1, 2.0)
    assert one(a, torch.ones(2)).measured is False
    assert one(torch.tensor([True]), torch.tensor([False])).max_abs == 1.0


def test_ignored_names_do_not_count() -> None:
    a, b = Held(**{"a.bias": torch.ones(1), "w": torch.ones(1)}), Held(w=torch.ones(1))
    found = diff(a, b, ignore=["*.bias"])
    assert (found.equal, found.tensors, found.ignored) == (True, 1, 1)


def test_measures_of_a_tensor() -> None:
    source = Held(w=torch.tensor([3.0, -4.0, math.nan, math.inf]), e=torch.zeros(0), i=torch.tensor([-7, 7]))
    assert measure(source, "w").to_json() == {"nan": 1, "inf": 1, "norm": 5.0, "min": -4.0, "max": 3.0}
    assert measure(source, "e").to_json() == {"nan": 0, "inf": 0, "norm": 0.0, "min": None, "max": None}
    assert measure(source, "i").high == 7.0
