"""Test what a study compares, and what it refuses before anything runs."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from scarctl.errors import UsageError
from scarctl.simulate.study import Study, parse_share

HALF, EIGHTH = Fraction(1, 2), Fraction(1, 8)


def test_cells_are_every_combination_once() -> None:
    cells = Study(workload="a:b", lost=(HALF, Fraction(1, 4)), fractions=(Fraction(1), EIGHTH)).cells()
    assert [(c.mode, c.policy, c.fraction, c.lost) for c in cells[:6]] == [
        ("rollback", "full", 1, None),
        ("partial", "full", 1, HALF),
        ("partial", "aged", EIGHTH, HALF),
        ("partial", "priority", EIGHTH, HALF),
        ("partial", "round", EIGHTH, HALF),
        ("partial", "random", EIGHTH, HALF),
    ]
    assert len(cells) == 1 + 2 * 5
    assert len(Study(workload="a:b", modes=("rollback",)).cells()) == 1


def test_it_comes_back_from_json() -> None:
    study = Study(
        workload="a.b:c", data="x", lost=(Fraction(1, 3),), interval=16, failure_rate=0.1, target=2.5, seed=9
    )
    assert Study.from_json(json.loads(json.dumps(study.to_json()))) == study


@pytest.mark.parametrize(
    "wrong",
    [
        {"workload": "nothing"},
        {"workload": "a:b:c"},
        {"workload": "a/b:c"},
        {"workload": ":c"},
        {"lost": ()},
        {"lost": (HALF, HALF)},
        {"policies": ("best",)},
        {"policies": ("full",)},
        {"modes": ("auto",)},
        {"interval": 0},
        {"interval": 4},
        {"failure_rate": 0.0},
        {"fail_after": 0},
        {"fail_after": 3, "failure_rate": 0.1},
        {"fail_after": 3, "stratify": True},
        {"smooth": 0},
        {"failure_rate": float("nan")},
        {"iterations": 1},
        {"target": float("inf")},
        {"norm": "l3"},
        {"seed": -1},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Study(**{"workload": "a:b", "fractions": (EIGHTH,), **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "share"), [("1/2", HALF), (" 0.125", EIGHTH), ("1", Fraction(1)), ("3/4", 1 - HALF / 2)]
)
def test_shares_are_read(text: str, share: Fraction) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "0", "-1/2", "5/4", "1/0", "half", "nan", "inf", "1e-99"])
def test_no_shares_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_share(text)
