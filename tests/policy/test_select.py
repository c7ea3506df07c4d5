"""Test the choice of partitions: budget, order, ties and ages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.policy.select import POLICIES, Candidates, Selection, select

BUDGETED = ("aged", "priority", "round", "random")
budgeted = st.sampled_from(BUDGETED)


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    distance_sq: NDArray[np.float64]
    nbytes: NDArray[np.int64]
    staleness: NDArray[np.int64]
    eligible: NDArray[np.bool_]
    budget: int
    credit: int = 0
    cursor: int = 0
    seed: int = 0
    step: int = 0
    max_staleness: int | None = None

    def select(self, policy: str, **changes: Any) -> Selection:
        fields = vars(replace(self, **changes))
        budget, credit, cursor = (fields.pop(name) for name in ("budget", "credit", "cursor"))
        return select(policy, Candidates(**fields), budget, credit=credit, cursor=cursor)

    @property
    def cap(self) -> int:
        return self.budget + int(self.nbytes.max(initial=0))

    @property
    def candidates(self) -> list[int]:
        return np.flatnonzero(self.eligible & np.isfinite(self.distance_sq) & (self.distance_sq > 0)).tolist()


def simple(distance_sq: Any, nbytes: Any = 1, **more: Any) -> Case:
    distance = np.array(distance_sq, dtype=np.float64)
    n = distance.size
    sizes = np.broadcast_to(np.asarray(nbytes, dtype=np.int64), n).copy()
    case = Case(distance, sizes, np.zeros(n, dtype=np.int64), np.ones(n, dtype=bool), budget=1)
    return replace(case, **{k: np.array(v) if isinstance(v, list) else v for k, v in more.items()})


# Few different values, so that equal keys and boundaries within them occur; extremes, so that digits differ.
distances = st.sampled_from([0.0, 1.0, 2.0, 3.0, 1e-300, 5e-324, 1e300, np.nan, np.inf]) | st.floats(0, 10)


@st.composite
def cases(draw: st.DrawFn, least: int = 0) -> Case:
    n = draw(st.integers(least, 12))
    array = lambda dtype, values: draw(hnp.arrays(dtype, n, elements=values))  # noqa: E731
    nbytes = array(np.int64, st.integers(1, 20))
    cursor = draw(st.integers(0, max(0, n - 1)))
    return Case(
        array(np.float64, distances),
        nbytes,
        array(np.int64, st.integers(0, 8)),
        array(np.bool_, st.booleans()),
        budget=draw(st.integers(0, 60)),
        credit=draw(st.integers(0, 60)),
        cursor=cursor,
        seed=draw(st.integers(-5, 2**70)),
        step=draw(st.integers(0, 2**40 - 1)),
        max_staleness=draw(st.none() | st.integers(1, 8)),
    )


# --- every policy ---------------------------------------------------------------------------------------------


@given(cases(), st.sampled_from(POLICIES))
def test_what_is_picked(case: Case, policy: str) -> None:
    got = case.select(policy)
    assert got.ids.dtype == got.nonfinite.dtype == np.int64
    assert (np.diff(got.ids) > 0).all()
    assert case.eligible[got.ids].all()
    assert np.isfinite(case.distance_sq[got.ids]).all()
    assert got.nonfinite.tolist() == np.flatnonzero(case.eligible & ~np.isfinite(case.distance_sq)).tolist()
    assert got.nbytes == case.nbytes[got.ids].sum()
    again = case.select(policy)
    assert (again.ids == got.ids).all()
    assert (again.credit, again.cursor) == (got.credit, got.cursor)


@given(cases(), budgeted)
def test_bytes_are_accounted_for(case: Case, policy: str) -> None:
    got = case.select(policy)
    room = case.budget + min(case.credit, case.cap)
    assert got.nbytes <= room
    assert got.credit == min(room - got.nbytes, case.cap)
    assert set(got.ids) <= set(case.candidates)
    left_out = [i for i in case.candidates if i not in set(got.ids)]
    if left_out:  # it stopped because something did not fit
        assert got.nbytes + case.nbytes[left_out].max() > room


@given(cases())
def test_full_takes_all_that_is_eligible_and_finite(case: Case) -> None:
    got = case.select("full", budget=0)
    assert got.ids.tolist() == np.flatnonzero(case.eligible & np.isfinite(case.distance_sq)).tolist()
    assert (got.credit, got.cursor) == (case.credit, case.cursor)


@pytest.mark.parametrize("policy", BUDGETED)
def test_a_budget_for_everything_takes_everything_that_changed(policy: str) -> None:
    got = simple([1, 0, np.nan, 4, 5], budget=9, cursor=2).select(policy)
    assert got.ids.tolist() == [0, 3, 4]
    assert got.nonfinite.tolist() == [2]
    assert got.credit == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": -1}, "negative"),
        ({"nbytes": np.ones(2, dtype=np.int64)}, "different shapes"),
        ({"eligible": np.ones((3, 1), dtype=bool)}, "different shapes"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simple([1, 2, 3]).select("priority", **change)


def test_unknown_policy() -> None:
    with pytest.raises(UsageError, match="unknown policy 'best'") as error:
        simple([1]).select("best")
    assert "priority" in error.value.hint


# --- the order ------------------------------------------------------------------------------------------------


def reference(case: Case, order: list[int]) -> list[int]:
    """Return the longest prefix of `order` within the budget, due partitions first, the stalest of them first."""
    if case.max_staleness is not None:
        due = [i for i in sorted(order) if case.staleness[i] >= case.max_staleness]
        due.sort(key=lambda i: -case.staleness[i])
        order = due + [i for i in order if i not in due]
    room = case.budget + min(case.credit, case.cap)
    sums = itertools.accumulate(int(case.nbytes[i]) for i in order)
    return sorted(i for i, total in zip(order, sums, strict=True) if total <= room)


@given(cases())
def test_priority_takes_most_distance_per_byte_first(case: Case) -> None:
    density = case.distance_sq / case.nbytes
    order = sorted(case.candidates, key=lambda i: (-density[i], i))
    assert case.select("priority").ids.tolist() == reference(case, order)


@given(cases())
def test_aged_takes_most_distance_times_age_per_byte_first(case: Case) -> None:
    with np.errstate(over="ignore"):
        urgency = case.distance_sq / case.nbytes * np.maximum(case.staleness, 1)
    order = sorted(case.candidates, key=lambda i: (-urgency[i], i))
    assert case.select("aged").ids.tolist() == reference(case, order)


def test_aged_prefers_the_older_of_two_equal_changes_and_survives_overflow() -> None:
    assert simple([4, 4, 9], staleness=[1, 3, 1]).select("aged").ids.tolist() == [1]
    assert simple([4, 4, 9], staleness=[1, 2, 1]).select("aged").ids.tolist() == [2]
    assert simple([4, 1e300, 1], staleness=[2**39, 2**40, 0]).select("aged").ids.tolist() == [1]


def test_aged_leaves_the_least_mean_perturbation() -> None:
    """Squared distances grow with the age, at rates that differ. The mean over time and partitions counts.

    With noise, the best frequency of a partition grows like the root of its rate; priority saves it like the rate.
    """
    rates = np.random.default_rng(0).lognormal(0, 2, 400)
    left = {}
    for policy in ("aged", "priority", "round"):
        case, total = simple(rates, staleness=np.zeros(400, np.int64), budget=50), 0.0
        for step in range(400):
            staleness = case.staleness + 1
            case = replace(case, distance_sq=rates * staleness.astype(float), staleness=staleness)
            total += case.distance_sq.sum() * (step >= 200)
            got = case.select(policy)
            staleness[got.ids] = 0
            case = replace(case, credit=got.credit, cursor=got.cursor)
        left[policy] = total
    assert left["aged"] < left["priority"] * 0.9, left
    assert left["aged"] < left["round"] * 0.75, left


@given(cases())
def test_round_takes_ids_from_the_cursor(case: Case) -> None:
    order = [i for i in case.candidates if i >= case.cursor] + [i for i in case.candidates if i < case.cursor]
    got = case.select("round")
    assert got.ids.tolist() == reference(case, order)
    if case.max_staleness is None:
        last = [i for i in order if i in set(got.ids)][-1:]
        assert got.cursor == ((last[0] + 1) % case.nbytes.size if last else case.cursor)


def test_priority_with_more_partitions_than_one_piece() -> None:
    rng = np.random.default_rng(0)
    distance = rng.random(300_000)
    got = simple(distance, budget=1000).select("priority")
    assert got.ids.tolist() == sorted(np.argsort(-distance)[:1000].tolist())


# --- over many calls ------------------------------------------------------------------------------------------


def run(case: Case, policy: str, calls: int) -> list[Selection]:
    """Return the selections of calls in which only staleness grows, with every partition changing all the time."""
    history = []
    for step in range(calls):
        got = case.select(policy, step=step)
        staleness = case.staleness + 1
        staleness[got.ids] = 0
        case = replace(case, credit=got.credit, cursor=got.cursor, staleness=staleness)
        history.append(got)
    return history


busy = st.builds(
    lambda sizes, budget, seed: simple(
        np.random.default_rng(seed).random(len(sizes)) + 0.1, sizes, budget=budget, seed=seed
    ),
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(0, 2**32),
)


@given(busy, budgeted)
def test_bytes_per_call_are_the_budget_in_the_long_run(case: Case, policy: str) -> None:
    calls = 60
    history = run(case, policy, calls)
    for first, last in ((0, calls), (10, 20), (30, 31)):
        spent = sum(got.nbytes for got in history[first:last])
        before = history[first - 1].credit if first else 0
        assert spent <= (last - first) * case.budget + before
        assert before <= case.cap
    total = int(case.nbytes.sum())
    if total >= 3 * case.cap:  # some partition never fits, so no credit is lost
        assert sum(got.nbytes for got in history) + history[-1].credit == calls * case.budget


@given(busy)
def test_round_visits_every_partition_once_a_round(case: Case) -> None:
    largest = int(case.nbytes.max())
    # A round covers all bytes; a budget may be unused while the credit grows to the largest partition.
    calls = 2 + -(-(int(case.nbytes.sum()) + largest) // case.budget)
    visits = np.concatenate([got.ids for got in run(case, "round", calls)])
    counts = np.bincount(visits, minlength=case.nbytes.size)
    assert counts.min() >= 1
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("policy", BUDGETED)
def test_a_partition_larger_than_the_budget_is_saved_when_the_credit_covers_it(policy: str) -> None:
    case = simple([1e6, 1, 1, 1], [100, 1, 1, 1], budget=7)
    history = run(case, policy, 400)
    saved = [step for step, got in enumerate(history) if 0 in got.ids]
    assert saved
    if policy == "priority":
        assert saved[0] == 14  # 15 budgets of 7 are the first to cover 100
        assert all(not got.ids.size for got in history[:14])


@given(busy, budgeted, st.integers(1, 10))
def test_max_staleness_is_kept_as_far_as_the_budget_allows(case: Case, policy: str, limit: int) -> None:
    # One partition hardly changes: without the limit, priority might never reach it.
    case = replace(case, distance_sq=np.append(case.distance_sq, 1e-9), nbytes=np.append(case.nbytes, 1))
    n = case.nbytes.size
    case = replace(case, staleness=np.zeros(n, np.int64), eligible=np.ones(n, bool), max_staleness=limit)
    calls_per_round = 2 + -(-(int(case.nbytes.sum()) + int(case.nbytes.max())) // case.budget)
    age = np.zeros(n, dtype=np.int64)
    for got in run(case, policy, 80):
        age += 1
        age[got.ids] = 0
        # A due partition waits for those that are staler, each at most once, and for the credit.
        assert age.max() <= limit + 2 * calls_per_round


def test_due_partitions_go_first_the_stalest_first() -> None:
    case = simple([9, 8, 1, 1, 0], 1, staleness=[0, 0, 5, 7, 99], max_staleness=5)
    assert case.select("priority", budget=1).ids.tolist() == [3]
    assert case.select("priority", budget=2).ids.tolist() == [2, 3]
    assert case.select("priority", budget=3).ids.tolist() == [0, 2, 3]


def test_others_wait_for_a_due_partition_that_does_not_fit_yet() -> None:
    case = simple([9, 1], [1, 10], staleness=[0, 5], max_staleness=5, budget=4)
    history = [case.select("priority", credit=credit) for credit in (0, 4, 8)]
    assert [got.ids.tolist() for got in history] == [[], [], [0, 1]]
    assert [got.credit for got in history] == [4, 8, 1]


# --- random ---------------------------------------------------------------------------------------------------


def test_random_never_changes() -> None:
    case = simple(np.ones(20), 1, budget=5, seed=3)
    assert case.select("random", step=7).ids.tolist() == [4, 7, 10, 13, 14]
    assert case.select("random", step=8).ids.tolist() == [1, 7, 10, 12, 15]
    assert case.select("random", step=7, seed=-1).ids.tolist() == [3, 4, 9, 14, 17]


def test_random_does_not_depend_on_distance() -> None:
    case = simple(np.arange(1, 101), 1, budget=10)
    assert (case.select("random").ids == case.select("random", distance_sq=np.ones(100)).ids).all()
