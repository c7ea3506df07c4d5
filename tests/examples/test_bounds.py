"""Test the bounds of the paper's appendix: zero at zero, reached by the worst sequence, never exceeded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.paper.bounds import (
    endless_rework_bound,
    irreducible_error,
    partial_perturbation,
    sgd_rework_bound,
)
from scarctl.theory.bounds import rework_bound
from tests.theory.test_bounds import distances, iterations, rates


class TestEndless:
    @given(rates, distances, st.floats(1e-3, 1e3))
    def test_zero_at_zero(self, c: float, x0: float, epsilon: float) -> None:
        assert endless_rework_bound(c, x0, 0.0, epsilon) == 0

    @given(st.floats(0.3, 0.95), st.floats(0.05, 0.9))
    def test_tight_on_the_adversarial_sequence(self, c: float, level: float) -> None:
        """`level`: in units of ε, the irreducible error."""
        x0, epsilon = 100.0, 1.0
        size = level * epsilon * (1 - c) / c
        x, k = x0, 0
        while x >= epsilon:
            x, k = c * (x + size), k + 1
        cost = k - iterations(c, x0, {}, epsilon)
        bound = endless_rework_bound(c, x0, size, epsilon)
        assert bound - 1 - 1e-6 < cost < bound + 1 + 1e-6

    def test_it_says_nothing_where_it_is_not_informative(self) -> None:
        floor = irreducible_error(0.9, 1.0)
        assert floor == pytest.approx(9)
        assert endless_rework_bound(0.9, 100.0, 1.0, floor) == math.inf
        assert endless_rework_bound(0.9, floor, 1.0, 100.0) == math.inf
        assert endless_rework_bound(0.9, 100.0, 1.0, floor + 1e-6) < math.inf


class TestSgd:
    @staticmethod
    def cost(perturbations: dict[int, float], epsilon: float = 0.05) -> float:
        return sgd_rework_bound(lambda k: 1 / (k + 2), 1.0, 2.0, perturbations, epsilon, limit=100_000)

    @given(st.floats(0.2, 0.95), st.integers(0, 10), st.floats(0, 10))
    def test_without_noise_and_at_a_constant_rate_it_is_the_linear_bound(
        self, c: float, step: int, size: float
    ) -> None:
        epsilon = 3.0 * c**20
        cost = sgd_rework_bound(lambda _: 1 - c * c, 0.0, 3.0, {step: size}, epsilon)
        assert abs(cost - rework_bound(c, 3.0, {step: size})) < 1 + 1e-6

    def test_real_sgd_stays_within(self) -> None:
        """A quadratic with noisy gradients, rate 1/(k+2) in the recursion, needs no more than the bound."""
        rng, runs = np.random.default_rng(0), 400
        kick, at, epsilon = 1.5, 30, 0.15

        def needed(perturbed: bool) -> int:
            x = np.full(runs, 2.0)
            for k in range(100_000):
                if k > at and math.sqrt(float(np.mean(x**2))) < epsilon:
                    return k
                if perturbed and k == at:
                    x = x + kick
                rate = 1 / (k + 2)  # (1 - rate/2)² <= 1 - rate + rate²/4: more than the recursion needs
                x = (1 - rate) * x + rate * rng.normal(0, 1, runs)
            raise AssertionError("does not converge")

        bound = sgd_rework_bound(lambda k: 1 / (k + 2), 1.0, 2.0, {at: kick}, epsilon)
        assert needed(True) - needed(False) <= bound

    def test_what_is_never_reached_is_infinite(self) -> None:
        assert sgd_rework_bound(lambda _: 0.5, 1.0, 1.0, {0: 1.0}, 0.1, limit=100) == math.inf


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_random_part_perturbs_by_its_share(parts: int, seed: int) -> None:
    """Theorem 4.2 over every loss of `lost` of the coordinates: each is in as many of them as any other."""
    rng = np.random.default_rng(seed)
    delta, lost = rng.normal(size=parts), int(rng.integers(1, parts + 1))
    turns = [np.roll(delta, shift)[:lost] for shift in range(parts)]
    mean = np.mean([np.sum(turn**2) for turn in turns])
    full = float(np.linalg.norm(delta))
    assert partial_perturbation(full, lost / parts) == pytest.approx(math.sqrt(mean))
    assert partial_perturbation(full, 1.0) == full
    assert partial_perturbation(full, 0.0) == 0
