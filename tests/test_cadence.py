"""The cadence keeps up with stores of any speed, within a budget, and does not flap."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scarctl.cadence import FIRST_INTERVAL, LONGEST_INTERVAL, Cadence
from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from tests.support.training import Loop

MB = 1_000_000


class Simulation:
    """A training loop and a store that takes hand-overs one after the other, at a speed that may change."""

    def __init__(self, cadence: Cadence, *, step_seconds: float, bandwidth: float, nbytes: int) -> None:
        self.cadence = cadence
        self.step_seconds = step_seconds
        self.bandwidth = bandwidth
        self.nbytes = nbytes
        self.now = 0.0
        self.step = 0
        self.handed = 0
        self.left: dict[int, float] = {}  # number -> bytes to go
        self.checkpoints: list[int] = []
        self.intervals: list[int] = []
        self.due = False

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            if self.due:
                self.handed += 1
                self.left[self.handed] = self.nbytes
                self.cadence.handed_over(self.now, self.handed, self.step, self.nbytes)
            self._save(self.step_seconds)
            self.now += self.step_seconds
            self.step += 1
            self.due = self.cadence.due(self.now, self.step, list(self.left))
            if self.due:
                self.checkpoints.append(self.step)
            self.intervals.append(self.cadence.interval)
        return self

    def _save(self, seconds: float) -> None:
        could = self.bandwidth * seconds
        for number in sorted(self.left):
            done = min(could, self.left[number])
            could -= done
            self.left[number] -= done
            if self.left[number] <= 1e-6:
                del self.left[number]


def test_a_number_means_every_so_many_iterations() -> None:
    cadence = Cadence(4, checkpoint_bytes=MB)
    assert [step for step in range(1, 13) if cadence.due(0.0, step, ())] == [4, 8, 12]


@given(
    step_seconds=st.floats(0.01, 10),
    steps_to_save=st.floats(0.01, 60),
    nbytes=st.integers(1, 10**12),
)
@settings(max_examples=30)
def test_saving_keeps_up_with_any_store(step_seconds: float, steps_to_save: float, nbytes: int) -> None:
    cadence = Cadence(None, checkpoint_bytes=nbytes)
    bandwidth = nbytes / (steps_to_save * step_seconds)
    wanted = steps_to_save / 0.8
    run = Simulation(cadence, step_seconds=step_seconds, bandwidth=bandwidth, nbytes=nbytes)
    run.run(100 + int(15 * wanted))
    late = run.checkpoints[-5:]
    # Nothing piles up, and the interval is not much longer than it has to be.
    assert len(run.left) <= 2
    assert wanted * 0.8 <= (late[-1] - late[0]) / 4 <= wanted * 1.5 + 2
    assert len(set(run.intervals[len(run.intervals) // 2 :])) <= 2


def test_no_interval_is_longer_than_the_longest() -> None:
    cadence = Cadence(None, checkpoint_bytes=100 * MB, max_bandwidth=1)
    cadence.due(0.0, 0, ())
    assert not cadence.due(0.1, 1, ())
    assert cadence.interval == LONGEST_INTERVAL


def test_before_the_first_measurement() -> None:
    cadence = Cadence(None, checkpoint_bytes=MB)
    assert cadence.interval == FIRST_INTERVAL
    due = [step for step in range(1, 31) if cadence.due(float(step), step, ())]
    assert due == [11, 21]


def test_the_byte_budget_counts_though_the_store_is_faster() -> None:
    cadence = Cadence(None, checkpoint_bytes=10 * MB, max_bandwidth=2 * MB)
    run = Simulation(cadence, step_seconds=0.5, bandwidth=1000 * MB, nbytes=10 * MB).run(400)
    spent = len(run.checkpoints[5:]) * 10 * MB / ((run.checkpoints[-1] - run.checkpoints[5]) * 0.5)
    assert spent <= 2.3 * MB
    assert run.cadence.interval == 10


@pytest.mark.parametrize("longer", [1.02, 1.1, 0.98, 0.9])
def test_a_little_noise_does_not_change_the_interval(longer: float) -> None:
    cadence = Cadence(None, checkpoint_bytes=100 * MB)
    run = Simulation(cadence, step_seconds=0.1, bandwidth=50 * MB, nbytes=100 * MB).run(1000)
    assert cadence.interval in range(25, 34)
    run.intervals.clear()
    for k in range(20):
        run.bandwidth = 50 * MB * (longer if k % 2 else 1.0)
        run.run(50)
    assert len(set(run.intervals[500:])) == 1


def test_a_store_that_hangs_and_comes_back() -> None:
    cadence = Cadence(None, checkpoint_bytes=MB)
    run = Simulation(cadence, step_seconds=0.1, bandwidth=5 * MB, nbytes=MB).run(200)
    usual = cadence.interval
    assert usual <= 5
    run.bandwidth = 0.0
    run.run(300)
    assert cadence.interval >= 100
    assert cadence.lag(run.step, list(run.left)) >= 290
    run.bandwidth = 5 * MB
    run.run(3000)
    assert cadence.interval <= usual + 1
    assert cadence.lag(run.step, list(run.left)) <= 5


def test_one_long_pause_is_no_long_step() -> None:
    cadence = Cadence(None, checkpoint_bytes=MB)
    run = Simulation(cadence, step_seconds=0.1, bandwidth=1 * MB, nbytes=MB).run(300)
    before = cadence.interval
    run.now += 600  # an evaluation, and meanwhile the store goes on
    run.left.clear()
    run.run(30)
    assert cadence.interval >= before / 3
    run.run(300)
    assert abs(cadence.interval - before) <= 4


def test_going_back_does_not_stop_it() -> None:
    cadence = Cadence(None, checkpoint_bytes=MB)
    assert not cadence.due(0.0, 1000, ())
    assert cadence.due(1.0, 1010, ())
    assert not cadence.due(2.0, 500, ())
    assert cadence.due(3.0, 510, ())


def test_lag_counts_from_the_oldest_that_waits() -> None:
    cadence = Cadence(5, checkpoint_bytes=MB)
    assert cadence.lag(3, ()) == 0
    cadence.handed_over(0.0, 7, 10, MB)
    cadence.handed_over(1.0, 8, 15, MB)
    assert cadence.lag(17, [7, 8]) == 7
    assert cadence.lag(17, [8]) == 2
    assert cadence.lag(17, [9]) == 0


def test_settings_from_text(tmp_path: Path) -> None:
    environ = {"SCARCTL_INTERVAL": "auto", "SCARCTL_MAX_BANDWIDTH": "1e8"}
    found = SessionSettings.resolve({"store": "s"}, environ=environ, folder=tmp_path)
    assert (found.interval, found.max_bandwidth) == ("auto", 1e8)
    (tmp_path / "scarctl.toml").write_text('store = "s"\ninterval = "auto"\n')
    assert SessionSettings.resolve({}, environ={}, folder=tmp_path).interval == "auto"
    with pytest.raises(UsageError, match="SCARCTL_INTERVAL"):
        SessionSettings.resolve({"store": "s"}, environ={"SCARCTL_INTERVAL": "often"}, folder=tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        {"interval": "often"},
        {"interval": True},
        {"max_bandwidth": 1e6},
        {"interval": "auto", "max_bandwidth": 0},
        {"interval": "auto", "max_bandwidth": float("nan")},
        {"interval": "auto", "max_bandwidth": "fast"},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SessionSettings(store="s", **bad)  # type: ignore[arg-type]


def test_a_session_finds_its_pace(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval="auto", fraction=0.25, on_error="raise")
    loop.train(20, settle=True)
    engine = loop.session._engine
    assert engine is not None
    # Everything is durable before the next step here, so every iteration may save.
    assert engine.cadence.bandwidth is not None
    assert engine.cadence.interval <= 2
    assert engine.lag(loop.session.head_step) == 0
    before = loop.session.stats.checkpoints
    loop.train(6, settle=True)
    assert loop.session.stats.checkpoints >= before + 3
    loop.session.close()


def test_a_session_stays_within_its_budget(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval="auto", max_bandwidth=1.0, on_error="raise")
    loop.train(30)
    engine = loop.session._engine
    assert engine is not None
    assert engine.cadence.interval == LONGEST_INTERVAL
    assert loop.session.stats.checkpoints == 1
    loop.session.close()
