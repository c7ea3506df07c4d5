"""Test the bounds: monotone in the perturbation, zero at zero, reached by the worst sequence, never exceeded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scarctl.errors import UsageError
from scarctl.theory.bounds import (
    elastic_constant,
    endless_rework_bound,
    irreducible_error,
    partial_perturbation,
    rework_bound,
    rework_bound_now,
    rework_bound_of_ages,
    sgd_rework_bound,
)
from scarctl.theory.history import History
from scarctl.theory.rework import Outlook

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


class TestElastic:
    def test_the_constant_is_the_least_that_holds_at_every_moment(self) -> None:
        moments = [np.array([3.0, 4.0]), np.array([[0.0, 2.0], [2.0, 0.0]]), np.zeros(2)]
        alphas = np.array([0.5, 0.1, 0.01])
        b = elastic_constant(moments, alphas)
        assert b == pytest.approx(20.0)
        squares = np.array([25.0, 4.0, 0.0])
        assert (squares <= (alphas * b) ** 2 + 1e-9).all()

    @pytest.mark.parametrize("delay", [1, 16])
    @pytest.mark.parametrize(
        ("curvature", "noise"), [((0.01, 0.01), 0.0), ((0.01, 1.0), 0.0), ((0.01, 0.01), 1.0)],
        ids=["straight", "spread", "noise"],
    )  # fmt: skip
    def test_the_staleness_of_gradients_on_quadratics(
        self, curvature: tuple[float, float], noise: float, delay: int
    ) -> None:
        """B/M is the true delay where the run goes straight, never more, and its root where steps are noise.

        The staleness that `inspect` shows has the recent movement over 4 steps for M. Steps that cancel make it too
        large by 2, the root of 4.
        """
        rate, steps, gap = 0.1, 400, 4
        curvatures, random = np.geomspace(*curvature, 50), np.random.default_rng(0)
        x = np.full((steps + 1, 50), 0.0 if noise else 1.0)
        gradients = np.empty((steps, 50))
        for t in range(steps):
            gradients[t] = curvatures * x[max(0, t - delay)] + noise * random.normal(size=50)
            x[t + 1] = x[t] - rate * gradients[t]
        away = x[delay:steps] - x[: steps - delay]
        largest = float(np.linalg.norm(gradients, axis=1).max())
        stale = elastic_constant(list(away), np.full(len(away), rate)) / largest
        moved = np.linalg.norm(x[gap::gap] - x[:-gap:gap], axis=1)
        history = History((gap * k, gap, norm) for k, norm in enumerate(moved.tolist()))
        shown = Outlook.after(steps, history).staleness(float(np.linalg.norm(x[steps] - x[steps - delay])))
        assert stale <= delay * (1 + 1e-9)
        if noise:
            assert stale == pytest.approx(math.sqrt(delay), rel=0.1)
            assert shown == pytest.approx(math.sqrt(gap * delay), rel=0.2)
        else:
            assert stale == pytest.approx(delay, rel=0.03)
            assert shown == pytest.approx(delay, rel=0.03)

    @pytest.mark.parametrize("alphas", [[], [0.0], [0.1, 0.1], [math.nan]])
    def test_nonsense_is_refused(self, alphas: list[float]) -> None:
        with pytest.raises(UsageError):
            elastic_constant([np.ones(2)], alphas)
