"""Test the cost model against a Monte Carlo of the same job, event by event, and against its known limits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scarctl.errors import UsageError
from scarctl.theory.bounds import rework_bound_of_ages
from scarctl.theory.job_cost import (
    HOUR,
    SHARE,
    Cost,
    Job,
    Way,
    advise,
    cost_of_background,
    cost_of_full,
    cost_of_nothing,
    cost_of_scar,
    daly_interval,
    mean_rework,
)

JOBS = {
    "large": Job(state_bytes=100e9, step_seconds=1.0, bandwidth=1e9, mtbf_seconds=3 * HOUR, shards=16),
    "unreliable": Job(
        state_bytes=20e9,
        step_seconds=0.2,
        bandwidth=0.5e9,
        mtbf_seconds=600.0,
        shards=8,
        restart_seconds=20.0,
        gain=0.3,
    ),
    "fast": Job(
        state_bytes=5e9,
        step_seconds=0.1,
        bandwidth=1e9,
        mtbf_seconds=HOUR,
        shards=4,
        convergence=0.999,
        gain=0.5,
    ),
    "alone": Job(state_bytes=8e9, step_seconds=0.5, bandwidth=0.4e9, mtbf_seconds=2 * HOUR, shards=1),
}
FAILURES = 8_000


class Clock:
    """Wall time, and the time of the next failure."""

    def __init__(self, mtbf: float, seed: int) -> None:
        self.random, self.mtbf = np.random.default_rng(seed), mtbf
        self.now, self.failures = 0.0, 0
        self.next = self.random.exponential(mtbf)

    def work(self, seconds: float) -> float:
        """Advance by so long, or to a failure; return the elapsed time."""
        done = min(seconds, self.next - self.now)
        self.now += done
        return done

    @property
    def failed(self) -> bool:
        if self.now < self.next:
            return False
        self.failures += 1
        self.next = self.now + self.random.exponential(self.mtbf)
        return True


def rolled_back(job: Job, interval: float, stall: float, latency: float, restart: float, seed: int) -> Cost:
    """Simulate a run that goes back to its newest durable checkpoint."""
    clock, restarting, saved = Clock(job.mtbf_seconds, seed), 0.0, 0.0
    while clock.failures < FAILURES:
        # From here: train `interval`, stall, and so on; checkpoint k is durable `latency` after its stall.
        done = clock.work(math.inf)
        secured = max(0, math.floor((done - latency) / (interval + stall)))
        saved += secured * interval
        assert clock.failed
        while True:
            began = clock.now
            clock.work(restart)
            restarting += clock.now - began
            if clock.now - began == restart or not clock.failed:
                break
    dump = saved * stall / interval
    scale = HOUR / saved
    return Cost(dump * scale, (clock.now - saved - dump - restarting) * scale, restarting * scale)


def with_scar(job: Job, fraction: float, interval: float, seed: int) -> Cost:
    """Simulate a run that never rolls back: every copy's age is looked up when a shard is lost."""
    clock = Clock(job.mtbf_seconds, seed)
    parts = round(1 / fraction)
    stall = (1 + fraction) * job.state_bytes / job.shards / job.memory_bandwidth
    latency = fraction * job.state_bytes / job.bandwidth
    restart = job.restart_seconds + job.state_bytes / job.shards / job.bandwidth
    gain = job.gain ** (math.log2(1 / fraction) / 3)
    trained = begun = parts * interval  # every part has a copy
    owed = restarting = pending = 0.0
    while clock.failures < FAILURES:
        if pending:
            done = clock.work(pending)
            restarting, pending = restarting + done, pending - done
        else:
            trained += clock.work(math.inf) / (1 + stall / interval)
        if clock.failed:
            newest = math.floor((trained - latency) / interval)
            ages = trained - interval * (newest - np.arange(parts))
            share = math.sqrt(gain / job.shards)
            owed += rework_bound_of_ages(job.convergence, ages / job.step_seconds, share) * job.step_seconds
            pending += restart
    solved = trained - begun - owed
    scale = HOUR / solved
    return Cost(solved * stall / interval * scale, owed * (1 + stall / interval) * scale, restarting * scale)


def close(one: Cost, other: Cost) -> None:
    assert one.total == pytest.approx(other.total, rel=0.05)
    for part in ("dump", "rework", "restart"):
        assert getattr(one, part) == pytest.approx(getattr(other, part), rel=0.05, abs=0.01 * other.total), (
            part
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "unreliable")) for name in JOBS]
)
class TestAgainstMonteCarlo:
    def test_full(self, name: str) -> None:
        job = JOBS[name]
        dump = job.state_bytes / job.bandwidth
        for interval in (advise(job).full.interval, 300.0):
            close(
                cost_of_full(job, interval),
                rolled_back(job, interval, dump, 0.0, job.restart_seconds + dump, seed=1),
            )

    def test_background(self, name: str) -> None:
        job = JOBS[name]
        written = job.state_bytes / job.bandwidth
        stall = job.state_bytes / job.shards / job.memory_bandwidth
        for interval in (advise(job).background.interval, 300.0):
            found = rolled_back(job, interval, stall, written, job.restart_seconds + written, seed=2)
            close(cost_of_background(job, interval), found)

    def test_scar(self, name: str) -> None:
        job = JOBS[name]
        best = advise(job).scar
        assert best.fraction is not None
        for fraction, interval in (
            (best.fraction, best.interval),
            (1.0, 400.0),
            (1 / 8, 60.0),
            (1 / 4, 30.0),
        ):
            close(cost_of_scar(job, fraction, interval), with_scar(job, fraction, interval, seed=3))

    def test_nothing(self, name: str) -> None:
        job = replace(JOBS[name], duration_seconds=2 * JOBS[name].mtbf_seconds)
        close(
            cost_of_nothing(job),
            rolled_back(job, job.duration_seconds, 0.0, 0.0, job.restart_seconds, seed=4),
        )


def test_the_advice_is_the_best_there_is() -> None:
    for job in JOBS.values():
        scar = advise(job).scar
        for fraction in (1.0, 1 / 2, 1 / 8, 1 / 32):
            least = fraction * job.state_bytes / job.bandwidth / SHARE
            for interval in np.geomspace(max(least, job.step_seconds), 2 * job.mtbf_seconds, 60).tolist():
                assert cost_of_scar(job, fraction, interval).total >= scar.cost.total * 0.99


def test_daly_is_near_the_true_optimum_and_young_his_limit() -> None:
    job = Job(state_bytes=60e9, step_seconds=1.0, bandwidth=1e9, mtbf_seconds=6 * HOUR)
    best = min(cost_of_full(job, interval).total for interval in np.geomspace(10, 1e5, 2000).tolist())
    assert cost_of_full(job, daly_interval(60.0, job.mtbf_seconds)).total == pytest.approx(best, rel=1e-3)
    assert daly_interval(1e-3, 1e6) == pytest.approx(math.sqrt(2 * 1e-3 * 1e6), rel=1e-3)
    assert daly_interval(100.0, 10.0) == 10.0


class TestLimits:
    def test_an_age_of_all_costs_the_age(self) -> None:
        """With one shard and everything saved at once, a partial recovery is a full one."""
        job = replace(JOBS["alone"], bandwidth=1e15)
        assert mean_rework(job, 1.0, 100.0) == pytest.approx(100.0 / 2 / job.step_seconds)

    def test_a_job_that_never_ends_costs_infinitely_much(self) -> None:
        job = Job(state_bytes=1e12, step_seconds=1.0, bandwidth=1e8, mtbf_seconds=10.0)
        assert all(math.isinf(way.cost.total) for way in advise(job).ways)
        assert not advise(job).pays

    def test_it_pays_for_a_large_state_in_many_parts_and_not_for_a_small_one(self) -> None:
        assert advise(JOBS["large"]).pays
        small = Job(state_bytes=1e6, step_seconds=0.1, bandwidth=1e9, mtbf_seconds=24 * HOUR, shards=1)
        assert not advise(small).pays
        assert advise(small).rival == min(
            (way for way in advise(small).ways if way.name != "scar"), key=lambda way: way.cost.total
        )
        assert isinstance(advise(small).rival, Way)


@pytest.mark.parametrize(
    "wrong",
    [
        {"state_bytes": 0.0},
        {"step_seconds": -1.0},
        {"bandwidth": math.inf},
        {"mtbf_seconds": math.nan},
        {"shards": 0},
        {"restart_seconds": -1.0},
        {"convergence": 0.0},
        {"convergence": 1.5},
        {"gain": 0.0},
        {"duration_seconds": 0.0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        replace(JOBS["large"], **wrong)  # type: ignore[arg-type]
