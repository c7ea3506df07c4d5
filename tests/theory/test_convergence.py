"""Test estimates of c and ‖x(0) - x*‖: right on known runs, no estimate where the data show nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.errors import UsageError
from scarctl.theory.convergence import Convergence, NoEstimate, fit_increments, fit_metric

K = np.arange(120)


def told(found: Convergence | NoEstimate) -> Convergence:
    assert isinstance(found, Convergence), found
    return found


@given(st.floats(0.9, 0.99), st.floats(1e-3, 1e3), st.floats(-5, 5))
def test_what_is_exact_is_found_exactly(c: float, x0: float, floor: float) -> None:
    by_metric = told(fit_metric(K, floor * x0 + x0 * c ** (2 * K)))
    assert by_metric.c == pytest.approx(c, rel=1e-3)
    assert by_metric.x0_distance is None
    found = told(fit_increments(K[::5], x0 * (c ** K[::5] - c ** (K[::5] + 5)), 5))
    assert found.c == pytest.approx(c, rel=1e-3)
    assert found.x0_distance == pytest.approx(x0, rel=1e-2)
    assert found.c_interval[0] <= found.c <= found.c_interval[1] < 1


@pytest.mark.slow
@pytest.mark.parametrize("correlated", [pytest.param(False, marks=pytest.mark.long), True])
def test_intervals_cover_the_truth(correlated: bool) -> None:
    rng, c, x0 = np.random.default_rng(7), 0.96, 10.0
    covered = {"metric": 0, "increments": 0, "distance": 0}
    for _ in range(40):
        noise = rng.normal(size=(2, len(K)))
        if correlated:
            for k in range(1, len(K)):
                noise[:, k] = 0.6 * noise[:, k - 1] + 0.8 * noise[:, k]
        metric = told(fit_metric(K, 3 + x0 * c ** (2 * K) + 0.3 * noise[0]))
        covered["metric"] += metric.c_interval[0] <= c <= metric.c_interval[1]
        increments = told(fit_increments(K, x0 * (c**K - c ** (K + 5)) + 0.1 * noise[1], 5))
        covered["increments"] += increments.c_interval[0] <= c <= increments.c_interval[1]
        assert increments.x0_interval is not None
        covered["distance"] += increments.x0_interval[0] <= x0 <= increments.x0_interval[1]
    assert min(covered.values()) >= 35, covered  # of 40, where 38 are expected


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.ones(120), "nothing changes"),
        (np.where(K == 50, np.nan, 0.9**K), "not finite"),
        (np.random.default_rng(0).normal(size=120), ""),
        (np.cumsum(np.random.default_rng(1).normal(size=120)), ""),
        (100.0 - K, ""),
        (1.0 + 0.95**-K, ""),
        (np.sin(K / 5.0), ""),
    ],
)
def test_what_shows_no_convergence_is_not_made_up(values: np.ndarray, says: str) -> None:
    found = fit_metric(K, values)
    assert isinstance(found, NoEstimate), found
    assert says in found.reason


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_sublinear_convergence_is_not_taken_for_linear(power: float, noise: float) -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        values = (K + 1.0) ** -power + noise * rng.normal(size=len(K))
        assert isinstance(fit_metric(K, values), NoEstimate)


def test_a_few_points_tell_nothing() -> None:
    found = fit_metric(range(5), 0.9 ** np.arange(5))
    assert isinstance(found, NoEstimate)
    assert found.reason == "5 of 8 points"


@pytest.mark.parametrize(
    ("steps", "values"),
    [([0, 1], [1.0]), ([1, 0, *range(2, 9)], np.ones(9)), ([0, 0, *range(1, 9)], np.ones(10))],
)
def test_nonsense_is_refused(steps: list[int], values: object) -> None:
    with pytest.raises(UsageError):
        fit_metric(steps, values)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        fit_increments(K, K, 0)
