"""Test predicted rework on runs whose truth is known, and the mode that is chosen by it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.errors import ScarError
from scarctl.theory.bounds import rework_at_angle, rework_bound_of_ages
from scarctl.theory.convergence import NoEstimate
from scarctl.theory.history import History
from scarctl.theory.rework import Outlook, Rework, choose, grouped, mean_age, rework_of_loss


def straight(c: float, steps: int, noise: float = 0.0, seed: int = 0) -> Outlook:
    """Return the outlook of a run that began at a distance of 1."""
    rng, history = np.random.default_rng(seed), History()
    for k in range(steps):
        history.add(k, 1, (c**k - c ** (k + 1)) * (1 + noise * rng.normal()))
    return Outlook(steps, history.convergence(steps))


def moving(speeds: list[float]) -> Outlook:
    """Return the outlook of a run that moves by these distances, one iteration each, with an unknown rate."""
    history = History((k, 1, speed) for k, speed in enumerate(speeds))
    return Outlook(len(speeds), NoEstimate("5 points"), history.speed())


UNTOLD = Outlook(9, NoEstimate("5 points"))


@pytest.mark.parametrize("share", [1 / 8, 1 / 2, 1.0])
def test_of_a_run_that_goes_straight_it_is_the_truth(share: float) -> None:
    """Every eighth coordinate, or half of them, returns to its value of 10 iterations ago."""
    c, steps, age, size = 0.95, 60, 10, 64
    x = np.full(size, 1 / math.sqrt(size))
    lost = np.arange(size) < share * size
    end, then = x * c**steps, x * c ** (steps - age)
    mixed = np.where(lost, then, end)
    truth = math.log(np.linalg.norm(mixed) / np.linalg.norm(end)) / -math.log(c)
    outlook = straight(c, steps)
    by_distance = outlook.of_perturbation(float(np.linalg.norm(mixed - end)), share)
    by_age = outlook.of_ages([age], share)
    for found in (by_distance, by_age):
        assert found.iterations == pytest.approx(truth, rel=1e-3)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= truth * 1.001
        assert truth * 0.999 <= found.high
    assert by_age.iterations == pytest.approx(age, rel=1e-3) if share == 1 else by_age.iterations < age
    # The measured perturbation has grown since.
    before = np.linalg.norm((then - x * c ** (steps - 4))[lost])
    later = outlook.of_perturbation(float(before), share, since=4)
    assert later.iterations == pytest.approx(truth, rel=1e-3)


def test_nothing_lost_costs_nothing_also_where_nothing_else_can_be_told() -> None:
    for norm, ages in ((0.0, [5.0]), (None, [0.0, 0.0]), (None, [])):
        found = rework_of_loss(UNTOLD, norm, ages, 0.5)
        assert (found.iterations, found.high) == (0.0, 0.0)
    found = rework_of_loss(UNTOLD, 1.0, [5.0], 0.5)
    assert (found.iterations, found.reason, str(found)) == (None, "5 points", "no estimate")


def test_a_perturbation_beyond_all_measure_costs_very_much() -> None:
    outlook = straight(0.9, 40)
    found = outlook.of_perturbation(1e200, 0.5)
    assert found.iterations is not None
    assert 1000 < found.iterations < 10_000
    assert outlook.of_perturbation(math.inf, 0.5).iterations is None


@pytest.mark.parametrize("outlook", [straight(0.9, 40), moving([1.0] * 9)])
def test_a_loss_costs_at_most_all_iterations_so_far(outlook: Outlook) -> None:
    """259 of 134 were predicted once: training them all again would have cost less."""
    found = rework_of_loss(outlook, 1e3, [5.0], 0.5, age=5.0)
    plain = outlook.of_perturbation(1e3, 0.5, age=5.0)
    assert plain.high is not None
    assert plain.high > outlook.step
    assert found.iterations is not None
    assert found.low is not None
    assert found.low <= found.iterations <= found.high == outlook.step
    assert (
        rework_of_loss(outlook, 1e-9, [5.0], 0.5, age=5.0).high
        == outlook.of_perturbation(1e-9, 0.5, age=5.0).high
    )


@given(st.floats(0.5, 0.999), st.floats(0, 1e4), st.floats(0, 1))
def test_no_angle_costs_more_than_the_bound(c: float, bound: float, cosine: float) -> None:
    found = rework_at_angle(c, bound, cosine)
    assert -1e-9 <= found <= bound * (1 + 1e-9) + 1e-9
    assert rework_at_angle(c, bound, 1.0) == pytest.approx(bound, rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.sampled_from([0.9, 0.999, 1.0]))
def test_ages_may_be_counted(ages: list[int], c: float) -> None:
    old, counts = grouped(np.array(ages))
    assert np.repeat(old, counts).tolist() == sorted(ages)
    assert rework_bound_of_ages(c, old, 0.5, counts=counts) == pytest.approx(
        rework_bound_of_ages(c, ages, 0.5)
    )
    assert grouped(np.empty(0, np.int64))[0].size == 0


KNOWN = Rework(10.0, 8.0, 15.0, "distances")
NONE = Rework(None, reason="5 points")


@pytest.mark.parametrize(
    ("mode", "rework", "back", "most", "taken"),
    [
        ("partial", KNOWN, 3, None, "partial"),
        ("rollback", KNOWN, 30, None, "rollback"),
        ("auto", KNOWN, 12, None, "partial"),
        ("auto", KNOWN, 9, None, "rollback"),
        ("auto", KNOWN, None, None, "partial"),
        ("auto", NONE, 3, None, "partial"),
        ("partial", KNOWN, 3, 15.0, "partial"),
        ("auto", KNOWN, 12, 13.0, "rollback"),
        ("auto", NONE, 3, 5.0, "rollback"),
        ("partial", KNOWN, 3, 14.0, None),
        ("partial", NONE, 3, 1e9, None),
        ("rollback", KNOWN, 30, 20.0, None),
        ("rollback", KNOWN, None, 20.0, None),
        ("auto", NONE, 30, 20.0, None),
        ("auto", KNOWN, 14, 13.0, None),
    ],
)
def test_the_way_back(
    mode: str, rework: Rework, back: int | None, most: float | None, taken: str | None
) -> None:
    if taken is None:
        with pytest.raises(ScarError) as refused:
            choose(mode, rework, back, most)
        assert refused.value.kind == "too-much-rework"
        assert "nothing was changed" in refused.value.hint
        return
    choice = choose(mode, rework, back, most)
    assert choice.mode == taken
    assert (choice.reason is None) == (mode != "auto")
    cost = choice.cost(rework, back)
    assert cost.rework == (rework if taken == "partial" else Rework(back, back, back, "steps"))


@pytest.mark.parametrize("delay", [1, 16])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_staleness_is_the_delay_of_who_sees_the_copies(delay: int, noise: float) -> None:
    rng = np.random.default_rng(delay)
    steps = 1.0 + noise * rng.normal(size=(200, 64))
    lengths = np.linalg.norm(steps, axis=1)
    away = float(np.linalg.norm(steps[-delay:].sum(0)))
    assert moving(lengths.tolist()).staleness(away) == pytest.approx(delay, rel=0.2)


@pytest.mark.parametrize("share", [1 / 8, 1 / 2, 1.0])
def test_without_a_rate_the_staleness_is_the_rework(share: float) -> None:
    """A part of a run at constant speed goes back by 10 iterations, which costs that part of 10."""
    outlook = moving([2.0] * 9)
    found = outlook.of_perturbation(10 * 2.0 * math.sqrt(share), share, age=10.0)
    assert found.basis == "staleness"
    assert found.iterations == pytest.approx(10 * share)
    assert (found.low, found.high) == (0.0, pytest.approx(10.0))
    assert found.reason == "5 points"


def test_a_run_that_speeds_up_or_slows_down_does_not_lower_the_bound() -> None:
    norm, age = 6.0, 3.0
    assert moving([1.0] * 9).of_perturbation(norm, 1.0, age=age).high == pytest.approx(6.0)
    assert moving([9.0] * 9).of_perturbation(norm, 1.0, age=age).high == pytest.approx(3.0)
    assert moving([1.0] * 9).of_perturbation(norm, 1.0, age=age, since=2).high == pytest.approx(8.0)


@pytest.mark.parametrize("outlook", [UNTOLD, moving([]), moving([0.0] * 9)])
def test_a_run_that_has_not_been_seen_to_move_has_no_estimate(outlook: Outlook) -> None:
    assert outlook.of_perturbation(1.0, 1.0, age=3.0).iterations is None
    assert moving([1.0]).of_perturbation(1.0, 1.0).iterations is None, "ages are unknown"


def test_auto_does_not_go_back_for_a_staleness() -> None:
    """The staleness is a bound, and often far from the cost."""
    assert choose("auto", Rework(9.0, 0.0, 20.0, "staleness", "5 points"), 3).mode == "partial"
    assert choose("auto", Rework(9.0, 0.0, 20.0, "staleness", "5 points"), 3, 5.0).mode == "rollback"


def test_a_bound_by_the_rate_is_no_lower_than_the_staleness() -> None:
    outlook = straight(0.95, 60)
    norm = 0.01
    plain = outlook.of_perturbation(norm, 0.5)
    both = replace(outlook, speed=0.001).of_perturbation(norm, 0.5, age=30.0)
    assert (both.iterations, both.low, both.basis) == (plain.iterations, plain.low, "distances")
    assert both.high == pytest.approx(30.0)


def test_the_age_of_what_has_moved_counts() -> None:
    assert mean_age(np.array([0.0, 3.0, 4.0]), np.array([100, 5, 5])) == pytest.approx(5.0)
    assert mean_age(np.array([3.0, 4.0]), np.array([0, 10])) == pytest.approx(8.0)
    assert mean_age(np.zeros(2), np.array([1, 2])) is None
    assert mean_age(np.array([np.nan]), np.array([1])) is None
