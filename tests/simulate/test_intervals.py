"""Test that 95 % intervals cover, by simulation, with few trials and with skewed costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from scarctl.simulate.intervals import LEAST_TRIALS, mean_of, ratio_of, student

RUNS = 1000
Pair = tuple[NDArray[np.float64], NDArray[np.float64]]
Costs = Callable[[np.random.Generator, int], Pair]


def even(rng: np.random.Generator, n: int) -> Pair:
    """Draw costs: a rollback costs the checkpoint's age, a partial recovery a part of it, plus noise."""
    age = rng.integers(0, 16, n).astype(np.float64)
    return np.round(age * 0.4 + rng.normal(0, 1, n)), age


def apart(rng: np.random.Generator, n: int) -> Pair:
    """Draw costs that are independent of the rollback's, some of them negative."""
    return np.round(rng.normal(1, 3, n)), rng.integers(0, 16, n).astype(np.float64)


def skewed(rng: np.random.Generator, n: int) -> Pair:
    """Draw mostly one or two iterations, and sometimes ten more."""
    cost = rng.geometric(0.4, n) - 1.0 + (rng.random(n) < 0.1) * rng.integers(0, 10, n)
    return cost, rng.integers(0, 16, n).astype(np.float64)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (29, 2.0452), (1000, 1.9623)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=6e-5)


@pytest.mark.parametrize(
    ("costs", "trials", "least"),
    [
        *((even, n, 0.93) for n in (5, 30)),
        *((apart, n, 0.93) for n in (5, 30)),
        (skewed, 20, 0.89),
        (skewed, 100, 0.92),
    ],
)
def test_they_cover(costs: Costs, trials: int, least: float) -> None:
    rng = np.random.default_rng(trials)
    many, of = costs(rng, 1_000_000)
    mean, ratio = many.mean(), many.mean() / of.mean()
    covered = np.zeros(2)
    for _ in range(RUNS):
        above, below = costs(rng, trials)
        found = mean_of(above), ratio_of(above, below)
        for k, (one, truth) in enumerate(zip(found, (mean, ratio), strict=True)):
            # Without an interval there is no claim.
            covered[k] += one.low is None or one.high is None or one.low <= truth <= one.high
    assert (covered / RUNS >= least).all(), covered / RUNS


def test_few_trials_claim_nothing() -> None:
    values = np.arange(1.0, LEAST_TRIALS)
    assert (mean_of(values).mean, mean_of(values).low) == (values.mean(), None)
    assert ratio_of(values, values).low is None
    assert mean_of(np.arange(1.0, LEAST_TRIALS + 1)).low is not None


def test_a_ratio_of_what_may_be_nothing_has_no_bounds() -> None:
    below = np.array([-5.0, 6.0, -4.0, 5.0, -1.0, 2.0])
    found = ratio_of(np.ones(6), below)
    assert (found.low, found.high) == (None, None)
    assert found.mean == pytest.approx(1 / below.mean())


def test_equal_trials_have_an_interval_without_length() -> None:
    found = ratio_of(np.full(6, 3.0), np.full(6, 4.0))
    assert (found.mean, found.low, found.high) == pytest.approx((0.75, 0.75, 0.75))
