"""Test that memory checkpoints are as frequent as their cost allows, and that nothing but their cost matters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from scarctl.policy.interval import LEAST_SECONDS, Cadence


def cadence(interval: int | None = None, *, shared: bool = False) -> Cadence:
    return Cadence(interval, overhead=0.01, max_loss=30.0, shared=shared)


def train(
    made: Cadence, steps: int, step_seconds: float | Callable[[], float], cost: float, *, first: int = 0
) -> tuple[list[int], list[float]]:
    """Train, with checkpoints that cost this many seconds. Return their steps and times."""
    now, at, times = 0.0, list[int](), list[float]()
    for step in range(first, first + steps):
        now += step_seconds if isinstance(step_seconds, float) else step_seconds()
        if made.due(now, step):
            at.append(step)
            times.append(now)
            made.spent(cost, 0.0)
            now += cost
    return at, times


def apart(times: list[float]) -> float:
    """Return the mean seconds between checkpoints, without the first few."""
    return (times[-1] - times[4]) / (len(times) - 5)


def test_the_first_checkpoint_after_the_whole_one_comes_at_once() -> None:
    assert train(cadence(), 100, 1.0, 0.5)[0][0] == 1


@given(cost=st.floats(1e-4, 0.3), step_seconds=st.floats(0.05, 2.0))
def test_checkpoints_take_the_budget_and_are_not_much_rarer(cost: float, step_seconds: float) -> None:
    wanted = max(cost / 0.01, LEAST_SECONDS)
    _, times = train(cadence(), int(20 * max(1, wanted / step_seconds)), step_seconds, cost)
    assert abs(apart(times) - wanted) <= 0.5 * step_seconds + cost + 1e-6 or wanted < step_seconds


@pytest.mark.parametrize(
    ("cost", "seconds", "share", "costly"),
    [(0.2, 20, 0.01, False), (0.45, 30, 0.015, False), (0.6, 30, 0.02, False), (3.0, 150, 0.02, True)],
)
def test_the_longest_loss_may_take_twice_the_budget_and_not_more(
    cost: float, seconds: float, share: float, costly: bool
) -> None:
    made = cadence()
    train(made, 1000, 1.0, cost)
    assert made.seconds == pytest.approx(seconds)
    assert made.share == pytest.approx(share)
    assert made.too_costly is costly


def test_a_dear_first_checkpoint_is_not_relied_on() -> None:
    made, costs = cadence(), iter([0.12, 0.1, 0.03])
    now, at = 0.0, list[float]()
    for step in range(1, 2000):
        now += 0.01
        if made.due(now, step):
            at.append(now)
            made.spent(next(costs, 0.02), 0.0)
    assert at[3] - at[0] < 3 * 0.12 / 0.05 + 0.1, "the first few may take five times the budget"
    assert np.diff(at)[4:] == pytest.approx(2.0, abs=0.02)


def test_waiting_and_copying_count_and_a_copy_that_training_has_waited_for_counts_once() -> None:
    made = cadence()
    made.spent(0.1, 0.2)
    assert made.cost == made.spent_seconds == pytest.approx(0.1 + 0.2)
    made.spent(0.25, 0.2, aside=False)
    assert made.spent_seconds == pytest.approx(0.3 + 0.25)


@pytest.mark.parametrize(("iteration", "copy", "here"), [(0.01, 0.02, True), (0.02, 0.01, False)])
def test_iterations_shorter_than_a_copy_make_it_themselves(iteration: float, copy: float, here: bool) -> None:
    made = cadence()
    assert not made.here(), "nothing is known yet"
    for step in range(3):
        made.due(step * iteration, step)
    made.spent(0.0, copy)
    assert made.here() is here
    # In the training thread a copy takes less, and that is no reason to go back.
    for _ in range(20):
        made.spent(0.7 * copy, 0.7 * copy, aside=False)
    assert made.here() is here


def test_an_unusually_dear_checkpoint_does_not_count() -> None:
    made, costs = cadence(), list[float | None]()
    for cost in (9.0, 1.0, 2.0, 3.0, 2.0, 2.0, 50.0, 50.0):
        made.spent(cost, 0.0)
        costs.append(made.cost)
    assert costs == [9.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_a_machine_fifteen_times_busier_hardly_changes_the_interval() -> None:
    """Iterations take 1 to 15 times as long, at random. A copy costs the same processor time."""
    rng = random.Random(0)
    _, quiet = train(cadence(), 2000, 0.1, 0.05)
    _, busy = train(cadence(), 2000, lambda: 0.1 * rng.uniform(1, 15), 0.05)
    assert 0.5 < apart(busy) / apart(quiet) < 2


def test_one_long_evaluation_is_no_long_iteration() -> None:
    made = cadence()
    train(made, 100, 0.1, 0.05)
    made.due(1e6, 100)
    assert made.step_seconds == pytest.approx(0.1, rel=1)


def test_an_interval_of_the_user_holds_beside_the_one_of_memory() -> None:
    at, _ = train(cadence(40), 400, 1.0, 0.15)
    assert set(range(0, 400, 40)) <= set(at), "each multiple"
    assert max(b - a for a, b in itertools.pairwise(at)) <= 16, "and what the budget allows between them"
    at, _ = train(cadence(4), 100, 1.0, 1000.0)
    assert at == list(range(0, 100, 4)), "even if that costs more than the budget"


def test_ranks_use_the_interval_that_they_agree_on() -> None:
    made = cadence(shared=True)
    at, _ = train(made, 20, 1.0, 0.1)
    assert (made.interval, made.proposed) == (1, 9)
    assert at == list(range(1, 20))
    for agreed, interval in ((7, 7), (0, 7), (9, 9)):
        made.agree(agreed)
        assert made.interval == interval
    assert train(made, 40, 1.0, 0.1, first=20)[0] == [28, 37, 46, 55]
    alone = cadence()
    alone.agree(7)
    assert alone.interval == 1


def test_a_rollback_does_not_stop_checkpoints() -> None:
    made = cadence()
    train(made, 100, 1.0, 0.1, first=1000)
    assert not made.due(200.0, 500)
    assert made.due(210.0, 510)


def test_settings_from_text(tmp_path: Path) -> None:
    usual = SessionSettings(store="s")
    assert (usual.interval, usual.overhead, usual.max_loss, usual.max_lag) == ("auto", 0.01, 30.0, 30.0)
    environ = {
        "SCARCTL_INTERVAL": "7",
        "SCARCTL_OVERHEAD": "2%",
        "SCARCTL_MAX_LOSS": "90",
        "SCARCTL_MAX_LAG": "5",
    }
    found = SessionSettings.resolve({"store": "s"}, environ=environ, folder=tmp_path)
    assert (found.interval, found.overhead, found.max_loss, found.max_lag) == (7, 0.02, 90.0, 5.0)
    found = SessionSettings.resolve({"store": "s"}, environ={"SCARCTL_MAX_BANDWIDTH": "1e8"}, folder=tmp_path)
    assert (found.interval, found.max_bandwidth) == ("auto", 1e8)
    (tmp_path / "scarctl.toml").write_text('store = "s"\ninterval = 5\noverhead = "1/200"\n')
    found = SessionSettings.resolve({}, environ={}, folder=tmp_path)
    assert (found.interval, found.overhead) == (5, 0.005)
    with pytest.raises(UsageError, match="the overhead is 'much'"):
        SessionSettings.resolve({"store": "s"}, environ={"SCARCTL_OVERHEAD": "much"}, folder=tmp_path)
    with pytest.raises(UsageError, match="SCARCTL_INTERVAL"):
        SessionSettings.resolve({"store": "s"}, environ={"SCARCTL_INTERVAL": "often"}, folder=tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        {"interval": "often"},
        {"interval": True},
        {"interval": 10, "max_bandwidth": 1e6},
        {"overhead": 0},
        {"overhead": 1.5},
        {"overhead": True},
        {"overhead": "1%"},
        {"max_loss": 0},
        {"max_lag": float("nan")},
        {"interval": "auto", "max_bandwidth": 0},
        {"interval": "auto", "max_bandwidth": float("nan")},
        {"interval": "auto", "max_bandwidth": "fast"},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SessionSettings(store="s", **bad)  # type: ignore[arg-type]
