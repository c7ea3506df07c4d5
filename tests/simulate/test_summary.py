"""Test means, intervals and the picture with made-up results."""

from __future__ import annotations

import xml.etree.ElementTree
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from scarctl.simulate.chart import draw
from scarctl.simulate.study import Study
from scarctl.simulate.summary import summarise

STUDY = Study(workload="a:b", fractions=(Fraction(1), Fraction(1, 8)), policies=("priority",))


def results(rework: np.ndarray) -> list[dict[str, Any]]:
    """rework: of shape (trials, cells)."""
    return [
        {
            "trial": trial,
            "undisturbed": 50,
            "same": trial != 0,
            "rework": row.tolist(),
            "perturbation": [3.0, 4.0, 0.0],
            "arrived": [True, True, trial != 1],
        }
        for trial, row in enumerate(rework)
    ]


def test_means_and_counts() -> None:
    summary = summarise(STUDY, results(np.array([[10, 5, -2], [20, 5, 2], [30, 5, 6]])))
    assert (summary.trials, summary.undisturbed, summary.irreproducible) == (3, 50, 1)
    assert [line.rework.mean for line in summary.cells] == [20, 5, 2]
    assert [line.given_up for line in summary.cells] == [0, 0, 1]
    assert [line.perturbation for line in summary.cells] == [3, 4, 0]
    assert summary.cells[0].reduction is None
    reductions = [line.reduction for line in summary.cells[1:]]
    assert [r.mean for r in reductions if r is not None] == pytest.approx([0.75, 0.9])


def test_policies_are_compared_with_taking_turns_in_the_same_failures() -> None:
    of = Study(workload="a:b", fractions=(Fraction(1), Fraction(1, 8)), policies=("aged", "round"))
    common = np.random.default_rng(2).exponential(50, (12, 1))
    rework = common + np.array([9.0, 3.0, 1.0, 2.0]) + np.random.default_rng(3).normal(0, 0.1, (12, 4))
    made = [{**r, "perturbation": [1.0] * 4, "arrived": [True] * 4} for r in results(rework)]
    found = [line.versus_round for line in summarise(of, made).cells]
    assert found[0] is found[1] is found[3] is None
    assert found[2] is not None
    assert found[2].mean == pytest.approx(-1, abs=0.2)
    assert found[2].low is not None
    assert found[2].high is not None
    assert found[2].low < found[2].mean < found[2].high < -0.8, "though single trials differ by far more"


def test_one_trial_has_no_interval_and_a_free_rollback_no_reduction() -> None:
    summary = summarise(STUDY, results(np.array([[0, 1, 2]])))
    assert summary.cells[1].rework.low is None
    assert summary.cells[1].reduction is None


@pytest.mark.parametrize(
    "rework", [np.zeros((1, 3)), np.full((4, 3), -7.0), np.array([[1e-3, 0, 0], [1e6, 5, -1e5]])]
)
@pytest.mark.parametrize("modes", [("partial", "rollback"), ("partial",), ("rollback",)])
def test_every_picture_is_one(rework: np.ndarray, modes: tuple[str, ...]) -> None:
    study = Study(workload="a:b", fractions=STUDY.fractions, policies=STUDY.policies, modes=modes)
    columns = {2: [0, 1, 2], 1: [1, 2] if modes == ("partial",) else [0]}[len(modes)]
    made = [
        {**r, **{name: [r[name][k] for k in columns] for name in ("rework", "perturbation", "arrived")}}
        for r in results(rework)
    ]
    root = xml.etree.ElementTree.fromstring(draw(study, summarise(study, made)))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        for name, most in {
            "x1": width,
            "x2": width,
            "cx": width,
            "y1": height,
            "y2": height,
            "cy": height,
        }.items():
            assert 0 <= float(element.attrib.get(name, 0)) <= most
