"""Test that a budget of training time is kept and used, whatever checkpoints cost, within bounds of the interval."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scarctl.policy.interval import Cadence
from scarctl.policy.overhead import LEAST_SHARE, LONGEST_SECONDS, Overhead

Draw = Callable[[random.Random], float]


class Training:
    """A simulated training, in which iterations vary and the cost of checkpoints is known.

    stall, slow: seconds that a checkpoint waits, and by which `span` iterations alongside it take longer.
    """

    def __init__(
        self, overhead: Overhead, *, seconds: float, stall: Draw, slow: Draw, span: int, seed: int
    ) -> None:
        self.overhead = overhead
        self.seconds = seconds
        self.stall, self.slow, self.span = stall, slow, span
        self.hooks = self.jitter = 0.0
        self.random = random.Random(seed)
        self.cost = self.trained = 0.0
        self.checkpoints = self._since = self._left = 0
        self._stall = self._slow = 0.0

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            own = self.seconds * max(0.2, self.random.gauss(1.0, self.jitter))
            self.trained += own
            stalled, busy = self.hooks, self._left > 0
            if busy:
                if self._left == self.span:
                    stalled += self._stall
                own += self._slow / self.span
                self._left -= 1
            self.overhead.step(own + stalled, stalled, busy=busy)
            self._since += 1
            if self._since >= self.overhead.interval:
                self._begin()
        return self

    def _begin(self) -> None:
        self.overhead.begin()
        self._since, self._left = 0, self.span
        self._stall, self._slow = self.stall(self.random), self.slow(self.random)
        self.cost += self._stall + self._slow
        self.checkpoints += 1

    def forget(self) -> Training:
        self.cost = self.trained = 0.0
        self.checkpoints = 0
        return self

    @property
    def share(self) -> float:
        """Return the true overhead, without hooks."""
        return self.cost / self.trained


def constant(value: float) -> Draw:
    return lambda _: value


@pytest.mark.slow
@given(
    budget=st.sampled_from([0.003, 0.01, 0.05]),
    seconds=st.floats(0.0005, 5.0),
    stalls=st.floats(0.3, 10.0),
    slows=st.floats(0.0, 5.0),
    spread=st.floats(0.0, 1.0),
    jitter=st.floats(0.0, 0.3),
    span=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_the_budget_is_kept_and_used_for_any_costs(
    budget: float,
    seconds: float,
    stalls: float,
    slows: float,
    spread: float,
    jitter: float,
    span: int,
    seed: int,
) -> None:
    # A checkpoint is so expensive that the budget allows one in 20 to 500 iterations, and no bound is
    # reached.
    unit = 20 * budget * seconds
    scale = min(1.0, 0.2 * LONGEST_SECONDS / (seconds * 20 * (stalls + slows)))
    run = Training(
        Overhead(budget),
        seconds=seconds,
        stall=lambda r: unit * scale * stalls * r.lognormvariate(-spread * spread / 2, spread),
        slow=lambda r: unit * scale * slows * r.uniform(0.5, 1.5),
        span=span,
        seed=seed,
    )
    run.jitter = jitter * min(1.0, budget * 10)
    run.run(3000).forget().run(12_000)
    assert run.checkpoints > 5
    # Half a checkpoint more or less than its share, and an estimate from noisy iterations.
    one = run.cost / run.checkpoints / run.trained
    assert run.share <= 1.15 * budget + 2 * one
    if run.overhead.interval > span + 8:
        assert run.share >= 0.7 * budget - 2 * one
    assert run.overhead.cost is not None
    assert run.overhead.cost.seconds == pytest.approx(run.cost / run.checkpoints, rel=0.9, abs=unit)


def test_a_checkpoint_that_costs_less_than_the_budget_is_made_in_every_iteration() -> None:
    run = Training(Overhead(0.01), seconds=1.0, stall=constant(0.003), slow=constant(0.0), span=1, seed=0)
    run.run(2000)
    assert run.overhead.interval <= 8
    assert run.checkpoints > 1500  # but for some pauses, which show how long an undisturbed iteration takes
    assert run.share <= 0.01


def test_what_one_checkpoint_takes_too_much_the_next_ones_pay_back() -> None:
    run = Training(Overhead(0.01), seconds=0.1, stall=constant(0.05), slow=constant(0.0), span=1, seed=0)
    run.run(2000)
    assert run.overhead.interval == pytest.approx(50, abs=2)
    run.stall = constant(1.0)
    run.run(run.overhead.interval)
    run.stall = constant(0.05)
    longest = 0
    for _ in range(4000):
        run.run(1)
        longest = max(longest, run.overhead.interval)
    assert longest > 75
    run.forget().run(1000)
    assert run.overhead.interval == pytest.approx(50, abs=2)
    assert run.share == pytest.approx(0.01, rel=0.1)


def test_iterations_that_are_slower_beside_a_copy_count() -> None:
    run = Training(Overhead(0.01), seconds=0.1, stall=constant(0.0), slow=constant(0.04), span=2, seed=0)
    run.jitter = 0.02
    run.run(4000)
    cost = run.overhead.cost
    assert cost is not None
    assert cost.slowed == pytest.approx(0.04, rel=0.3)
    assert run.overhead.interval == pytest.approx(40, rel=0.3)
    assert run.overhead.share == pytest.approx(0.01, rel=0.3)
    assert run.overhead.slowed_seconds == pytest.approx(0.04 * run.checkpoints, rel=0.2)


def test_noise_in_the_slowdown_never_makes_up_for_stalls() -> None:
    """Iterations alongside copies happen to be shorter here than the others; the stall is exact, and counts."""
    run = Training(Overhead(0.01), seconds=0.1, stall=constant(0.01), slow=constant(-0.05), span=1, seed=0)
    run.run(3000)
    assert run.overhead.interval == pytest.approx(10, abs=1)
    assert run.overhead.share == pytest.approx(0.01, rel=0.1)


def test_evaluations_between_iterations_do_not_count_as_overhead() -> None:
    run = Training(Overhead(0.01), seconds=0.1, stall=constant(0.02), slow=constant(0.0), span=1, seed=3)
    overhead = run.overhead
    for number in range(4000):
        run.run(1)
        if number % 97 == 0 and not run._left:
            overhead.step(30.0, 0.0, busy=False)  # 300 usual iterations
    assert overhead.interval == pytest.approx(20, abs=8)
    assert overhead.step_seconds == pytest.approx(0.1, rel=0.1)


def test_hooks_of_every_iteration_come_out_of_the_budget() -> None:
    run = Training(Overhead(0.01), seconds=0.1, stall=constant(0.01), slow=constant(0.0), span=1, seed=0)
    run.hooks = 0.0005
    run.run(2000)
    assert run.overhead.hook_seconds == pytest.approx(0.0005)
    assert run.overhead.interval == pytest.approx(20, abs=2)
    assert run.overhead.share == pytest.approx(0.01, rel=0.1)
    run.hooks = 0.01  # more than all of it
    run.run(4000)
    assert run.overhead.interval == pytest.approx(10 / LEAST_SHARE, abs=4)


def test_one_noisy_measurement_leaves_no_young_run_without_a_copy() -> None:
    run = Training(Overhead(0.01), seconds=0.02, stall=constant(0.0005), slow=constant(0.5), span=1, seed=0)
    for step in range(1, 2000):
        if run.checkpoints == 3:
            run.slow = constant(0.0)  # iterations alongside the first ones were disturbed, but not by them
        run.run(1)
        assert run._since <= max(45, step / 2 + 2)
    assert run.overhead.interval < 10


def test_a_young_run_does_not_save_an_expensive_checkpoint_often() -> None:
    run = Training(Overhead(0.01), seconds=1.0, stall=constant(2.0), slow=constant(0.0), span=1, seed=0)
    run.run(100)
    assert run.share <= 0.09 + 4 * 2.0 / 100  # and a few before anything was measured
    run.run(3000)
    assert run.share <= 0.012


def test_a_very_expensive_checkpoint_is_made_at_last_and_the_budget_is_exceeded() -> None:
    run = Training(Overhead(0.01), seconds=1.0, stall=constant(60.0), slow=constant(0.0), span=1, seed=0)
    run.run(5000)
    assert run.overhead.bounded
    assert run.overhead.interval == pytest.approx(LONGEST_SECONDS, abs=2)
    run.stall = constant(0.5)
    run.run(20_000)  # the excess is not paid back forever
    assert not run.overhead.bounded
    assert run.overhead.interval == pytest.approx(50, abs=5)


def test_other_saving_says_nothing_about_regular_checkpoints() -> None:
    overhead = Overhead(0.01)
    for _ in range(10):
        overhead.step(0.1, 0.0, busy=False)
    overhead.begin()
    for _ in range(20):
        overhead.skip()
    overhead.begin()
    assert overhead.cost is None
    assert overhead.interval == 8  # nothing is known yet, and an interval of 1 could cost anything


def test_without_quiet_iterations_an_interval_grows_until_there_are_some() -> None:
    overhead, intervals = Overhead(0.01), []
    for _ in range(8):
        overhead.begin()
        intervals.append(overhead.interval)
        for _ in range(overhead.interval):
            overhead.step(0.1, 0.0, busy=True)
    assert intervals[-1] == 64
    for _ in range(5):
        overhead.step(0.1, 0.0, busy=False)
    overhead.begin()
    assert overhead.interval == 1


def test_once_there_is_a_quiet_iteration_no_checkpoint_begins_until_there_are_enough() -> None:
    overhead = Overhead(0.01)
    assert (overhead.interval, overhead.probing) == (8, True)
    overhead.begin()
    for _ in range(20):
        overhead.step(0.1, 0.0, busy=True)
    assert overhead.interval <= 20  # a checkpoint is due
    for number in range(21, 25):
        overhead.step(0.1, 0.0, busy=False)
        assert overhead.interval == 25 > number
    overhead.step(0.1, 0.0, busy=False)
    assert (overhead.interval, overhead.probing) == (1, False)


def test_costs_are_measured_once_the_first_state_is_durable_though_the_store_never_rests() -> None:
    """The first state is no regular checkpoint; each regular one is handed over before the one before it is durable."""
    cadence = Cadence(4, checkpoint_bytes=1000)
    cadence.handed_over(0.0, 0, 8000, regular=False)
    now, due = 0.0, False
    waiting = {0: 6}
    """Steps at which hand-overs become durable, by number."""
    for step in range(1, 60):
        if due:
            cadence.handed_over(now, step, 1000)
            waiting[step] = step + 5
        now += 0.15 if due else 0.1
        waiting = {number: at for number, at in waiting.items() if at > step}
        assert waiting
        due = cadence.due(now, step, list(waiting), stalled=0.05 if due else 0.0)
    cost = cadence.overhead.cost
    assert cost is not None
    assert cost.stalled == pytest.approx(0.05)


class Store:
    """A training with a clock, a store that never waits, and copies that cost training `cost` seconds."""

    def __init__(self, cadence: Cadence, cost: float) -> None:
        self.cadence, self.cost, self.now, self.step = cadence, cost, 0.0, 0
        self.due = False
        self.checkpoints: list[int] = []

    def run(self, steps: int) -> Store:
        for _ in range(steps):
            stalled = self.cost if self.due else 0.0
            self.now += 0.1 + stalled
            self.step += 1
            self.due = self.cadence.due(self.now, self.step, (), stalled=stalled)
            if self.due:
                self.checkpoints.append(self.step)
        return self


def test_the_longer_of_what_store_and_budget_require_is_the_interval() -> None:
    cheap = Store(
        Cadence(None, checkpoint_bytes=1000, overhead=0.01, max_bandwidth=200.0, divisible=False), 0.001
    ).run(500)
    assert cheap.cadence.interval in range(50, 65)  # 1000 bytes at 200 a second, in iterations of 0.1 s
    dear = Store(
        Cadence(None, checkpoint_bytes=1000, overhead=0.01, max_bandwidth=200.0, divisible=False), 0.2
    ).run(3000)
    assert dear.cadence.interval in range(195, 210)  # the first ones came earlier: they are paid back


def test_ranks_take_the_longest_interval_of_all_and_take_it_together() -> None:
    """Each rank has its own cost; what all propose at one checkpoint holds from the next but one on."""
    ranks = [
        Store(Cadence(None, checkpoint_bytes=1000, overhead=0.01, shared=True), cost)
        for cost in (0.005, 0.05, 0.02)
    ]
    rounds: list[int] = []
    for _ in range(2000):
        due = {rank.run(1).due for rank in ranks}
        assert len(due) == 1
        if due == {True}:
            rounds.append(max(rank.cadence.proposed for rank in ranks))
            for rank in ranks:
                rank.cadence.agree(rounds[-3] if len(rounds) > 2 else 0)
    assert {tuple(rank.checkpoints) for rank in ranks} == {tuple(ranks[0].checkpoints)}
    assert {rank.cadence.interval for rank in ranks} <= set(range(48, 55))
    spent = 0.05 * len([step for step in ranks[0].checkpoints if step > 500])
    assert spent <= 0.0105 * 1500 * 0.1


def test_a_fixed_interval_is_measured_and_stays() -> None:
    fixed = Store(Cadence(4, checkpoint_bytes=1000), 0.05).run(200)
    assert fixed.checkpoints == list(range(4, 201, 4))
    cost = fixed.cadence.overhead.cost
    assert cost is not None
    assert cost.stalled == pytest.approx(0.05)
    assert fixed.cadence.overhead.share == pytest.approx(0.125, rel=0.05)
