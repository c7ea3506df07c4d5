"""Test extrapolating recovery: what it fits, when it does nothing, and its effect on a run."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from scarctl.simulate.study import Study
from scarctl.simulate.summary import summarise
from scarctl.simulate.trial import run_trial
from tests.simulate.workloads import Dropout, Quadratic

HALF, EIGHTH = Fraction(1, 2), Fraction(1, 8)


def study(**settings: Any) -> Study:
    usual = {
        "workload": "a:b",
        "interval": 16,
        "modes": ("partial", "extrapolate"),
        "policies": ("priority",),
    }
    return Study(**{**usual, **settings})


@pytest.mark.long
def test_a_run_that_goes_straight_is_perturbed_less() -> None:
    of = study(fractions=(EIGHTH,), interval=8)
    summary = summarise(of, [run_trial(of, Quadratic(), trial) for trial in range(30)])
    plain, moved = summary.cells
    assert (plain.cell.mode, moved.cell.mode) == ("partial", "extrapolate")
    assert moved.perturbation < plain.perturbation
    assert moved.rework.mean <= plain.rework.mean


def test_the_factor_and_the_place_are_as_they_should_be() -> None:
    """Values that grow by 1 in every iteration, saved in every fourth, are extrapolated completely."""

    class Straight(Quadratic):
        iterations = 50

        def step(self, iteration: int) -> None:
            self._state["x"] += 1.0

        def metric(self) -> float:
            return -float(self._state["x"].mean())

    of = study(fractions=(Fraction(1),), interval=4, fail_after=43, policies=("round",))
    plain, moved = run_trial(of, Straight(), 0)["perturbation"]
    assert plain == pytest.approx(3 * np.sqrt(32 * 4))
    assert moved < plain / 4


def test_other_ways_see_nothing_of_it() -> None:
    """Optimizer slots, counters and rollbacks are the same with and without extrapolation."""
    of = study(fractions=(HALF,), interval=4, modes=("rollback", "partial"))
    with_it = study(fractions=(HALF,), interval=4, modes=("rollback", "partial", "extrapolate"))
    for trial in range(3):
        alone, beside = run_trial(of, Dropout(), trial), run_trial(with_it, Dropout(), trial)
        for key in ("rework", "perturbation", "arrived"):
            assert beside[key][:2] == alone[key]


def test_a_failure_at_a_given_iteration() -> None:
    of = study(fail_after=7, modes=("rollback",), interval=4)
    result = run_trial(of, Quadratic(), 0)
    assert (result["failed_after"], result["rework"]) == (7, [3])


def test_state_that_follows_from_the_rest_is_made_again() -> None:
    class Doubled(Quadratic):
        """Its metric is computed from a copy, which a recovery must renew."""

        def reset(self, seed: int) -> None:
            super().reset(seed)
            self.made = 0
            self.recompute()

        def recompute(self) -> None:
            self.made += 1
            self.copy = self._state["x"].copy()

    of = study(fractions=(Fraction(1),), modes=("rollback", "partial"))
    workload = Doubled()
    run_trial(of, workload, 0)
    assert workload.made == 1 + 2
