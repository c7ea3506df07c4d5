"""Test that the paper's models train on the real data, and its figures can be measured. Without the data: skipped."""

from __future__ import annotations

from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scarctl.simulate.study import Study
from scarctl.simulate.trial import run_trial
from scarctl.simulate.workload import load

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
EIGHTH = Fraction(1, 8)

needs_numba = pytest.mark.skipif(
    find_spec("numba") is None, reason="numba is not installed: see the extra [paper]"
)

MODELS = [
    pytest.param("mlr:build", "mnist", 6e4),
    pytest.param("als:build", "movielens-small", None, marks=[needs_numba, pytest.mark.long]),
    pytest.param("als:build_curved", "movielens-small", None, marks=[needs_numba, pytest.mark.long]),
    pytest.param("als:build_only_r", "movielens-small", None, marks=[needs_numba, pytest.mark.long]),
    pytest.param("als:build_only_l", "movielens-small", None, marks=[needs_numba, pytest.mark.long]),
    pytest.param("lda:build", "reuters-395", None, marks=[needs_numba, pytest.mark.long]),
    pytest.param("lda_resampled:build", "reuters-395", None, marks=[needs_numba, pytest.mark.long]),
    pytest.param("cnn:by_shard", "mnist", 2.28, marks=pytest.mark.long),
    pytest.param("cnn:by_layer_curved", "mnist", 2.28, marks=pytest.mark.long),
]


def data(name: str) -> str:
    if not (DATA / name).is_dir():
        pytest.skip(f"{DATA.name}/{name} is not beside the repository")
    return str(DATA)


@pytest.mark.parametrize(("name", "folder", "target"), MODELS)
def test_a_failure_and_all_ways_back(name: str, folder: str, target: float | None) -> None:
    workload: Any = load(f"examples.paper.{name}", data(folder))
    of = Study(
        workload=f"examples.paper.{name}",
        iterations=6 if target is None else None,
        target=target,
        fractions=(EIGHTH,),
        policies=("priority",),
        modes=("rollback", "partial"),
    )
    result = run_trial(of, workload, 0)
    assert result["same"]
    assert all(result["arrived"])
    # A rollback is exact: it costs the iterations after the checkpoint, which is the first iteration.
    assert result["rework"][0] == result["failed_after"] - (8 if result["failed_after"] >= 8 else 1)


@needs_numba
def test_least_squares_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python, because compiling takes long."""
    from examples.paper import als

    monkeypatch.setattr(als, "_cholesky", als._cholesky.py_func)

    random = np.random.default_rng(0)
    starts, given = np.array([0, 3, 33]), random.normal(size=(40, als.FACTORS))
    columns, ratings, found = random.integers(0, 40, 33), random.normal(size=33), np.empty((2, als.FACTORS))
    als._solve.py_func(starts, columns, ratings, given, found)
    for row in range(2):
        x, y = given[columns[starts[row] : starts[row + 1]]], ratings[starts[row] : starts[row + 1]]
        assert np.allclose(found[row], np.linalg.solve(x.T @ x + als.PENALTY * np.eye(als.FACTORS), x.T @ y))


@needs_numba
def test_the_norm_is_total_variation_times_length() -> None:
    from examples.paper.lda import scaled_variation

    live = torch.tensor([[0, 0, 1, 2], [3, 3, -1, -1]], dtype=torch.int16)
    saved = torch.tensor([[0, 1, 1, 1], [3, 3, -1, -1]], dtype=torch.int16)
    # The 4 tokens (2, 1, 1) of three topics became (1, 3, 0): half of 1 + 2 + 1.
    assert scaled_variation({"": live}, {"": saved}).tolist() == [2.0, 0.0]


def test_costs_on_the_quadratic_stay_below_the_bound() -> None:
    pytest.importorskip("numba")
    from examples.paper.perturb import quadratic

    for costs in quadratic(200):
        assert costs.above == 0
        assert min(cost for _, cost in costs.points) < 0
