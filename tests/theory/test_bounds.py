"""Test the bounds: monotone in the perturbation, zero at zero, reached by the worst sequence, never exceeded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scarctl.errors import UsageError
from scarctl.theory.bounds import (
    rework_bound,
    rework_bound_now,
    rework_bound_of_ages,
)

rates = st.floats(0.05, 0.995)
sizes = st.floats(0, 1e6)
distances = st.floats(1e-3, 1e6)
sequences = st.dictionaries(st.integers(0, 60), sizes, max_size=6)


def iterations(c: float, x0: float, perturbations: dict[int, float], epsilon: float) -> int:
    """Return the iterations that x -> c x needs from x0 if every perturbation pushes straight away from 0."""
    last = max(perturbations, default=-1)
    x, k = x0, 0
    while k <= last or x >= epsilon:
        x = c * (x + perturbations.get(k, 0.0))
        k += 1
    return k


class TestReworkBound:
    @given(rates, distances, sequences)
    def test_nothing_costs_nothing(self, c: float, x0: float, steps: dict[int, float]) -> None:
        assert rework_bound(c, x0, {}) == 0
        assert rework_bound(c, x0, dict.fromkeys(steps, 0.0)) == 0

    @given(
        st.floats(0.3, 0.98),
        st.floats(0.1, 1e3),
        st.dictionaries(st.integers(0, 30), st.floats(0, 50), max_size=4),
    )
    def test_it_is_tight_on_the_adversarial_sequence(
        self, c: float, x0: float, perturbations: dict[int, float]
    ) -> None:
        # Far enough that ε is not reached before the last perturbation, as the theorem assumes.
        epsilon = x0 * c**40
        cost = iterations(c, x0, perturbations, epsilon) - iterations(c, x0, {}, epsilon)
        bound = rework_bound(c, x0, perturbations)
        # Iterations are whole, the bound is not: two roundings, each of less than one.
        assert bound - 1 - 1e-6 < cost < bound + 1 + 1e-6

    @given(
        st.floats(0.3, 0.95),
        st.lists(
            st.tuples(st.integers(0, 20), st.lists(st.floats(-20, 20), min_size=3, max_size=3)), max_size=4
        ),
    )
    def test_no_other_sequence_costs_more(self, c: float, kicks: list[tuple[int, list[float]]]) -> None:
        x0, epsilon = np.array([3.0, -4.0, 12.0]), 13 * c**30
        moves = {step: np.array(kick) for step, kick in kicks}

        def count(moves: dict[int, np.ndarray]) -> int:
            y, k = x0, 0
            while k <= max(moves, default=-1) or np.linalg.norm(y) >= epsilon:
                y, k = c * (y + moves.get(k, 0.0)), k + 1
            return k

        bound = rework_bound(c, 13.0, {step: float(np.linalg.norm(kick)) for step, kick in moves.items()})
        assert count(moves) - count({}) < bound + 1 + 1e-6

    @given(rates, distances, st.integers(0, 60), sizes)
    def test_one_perturbation_now(self, c: float, x0: float, step: int, size: float) -> None:
        now = x0 * c**step
        assume(now > 1e-250)
        assert math.isclose(
            rework_bound_now(c, now, size), rework_bound(c, x0, {step: size}), rel_tol=1e-6, abs_tol=1e-9
        )

    def test_a_long_run_does_not_overflow(self) -> None:
        assert rework_bound(0.9, 1.0, {1_000_000: 1e-3}) == pytest.approx(
            1_000_000 + math.log(1e-3) / -math.log(0.9)
        )

    @pytest.mark.parametrize(
        ("c", "x0", "size"),
        [(0, 1, 1), (1, 1, 1), (math.nan, 1, 1), (0.5, 0, 1), (0.5, 1, -1), (0.5, 1, math.nan)],
    )
    def test_nonsense_is_refused(self, c: float, x0: float, size: float) -> None:
        with pytest.raises(UsageError):
            rework_bound(c, x0, {0: size})


class TestOfAge:
    @given(rates, st.floats(0, 500))
    def test_a_full_recovery_costs_its_age(self, c: float, age: float) -> None:
        assert rework_bound_of_ages(c, age) == pytest.approx(age, rel=1e-9, abs=1e-9)

    @given(rates, st.floats(0, 500), st.floats(0, 1))
    def test_a_part_costs_less_and_slow_convergence_least(self, c: float, age: float, share: float) -> None:
        cost = rework_bound_of_ages(c, age, share)
        assert rework_bound_of_ages(1.0, age, share) <= cost + 1e-9
        assert cost <= age + 1e-9

    @given(st.floats(0.5, 0.99), st.floats(0.1, 40), st.floats(0.01, 1))
    def test_it_is_the_bound_of_the_movement(self, c: float, age: float, share: float) -> None:
        moved = share * (c**-age - 1)
        assert rework_bound_of_ages(c, age, share) == pytest.approx(rework_bound_now(c, 1.0, moved), rel=1e-6)
