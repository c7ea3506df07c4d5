"""Test which results count as predictions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from scarctl.simulate.calibration import compare
from scarctl.simulate.study import Study

STUDY = Study(workload="m:w", fractions=(Fraction(1, 8),), policies=("round",), modes=("partial",))


def failure(cost: int, iterations: float | None, high: float | None) -> dict[str, Any]:
    one = {"iterations": iterations, "low": None if high is None else 0.0, "high": high}
    return {"rework": [cost], "predicted": [{"distances": one, "ages": one}], "rollback_steps": None}


def test_a_loss_of_what_had_not_changed_is_no_hit() -> None:
    results = [failure(0, 0.0, 0.0), failure(3, 2.0, 4.0), failure(9, 2.0, 4.0), failure(1, None, None)]
    (row, _) = compare(STUDY, results).rows
    assert (row.failures, row.unchanged, row.estimates) == (4, 1, 2)
    assert row.within_bound == 0.5


def test_a_study_in_which_nothing_was_predicted() -> None:
    (row, _) = compare(STUDY, [failure(0, 0.0, 0.0), failure(1, None, None)]).rows
    assert (row.unchanged, row.estimates, row.within_bound) == (1, 0, None)
    assert "0 of 1" in compare(STUDY, [failure(0, 0.0, 0.0), failure(1, None, None)]).text()[1]
