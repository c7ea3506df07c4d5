"""Test that the interval suits stores of any speed, within a budget, with suitable sizes, without oscillation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scarctl.checkpoint.pace
import scarctl.checkpoint.tracker
from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from scarctl.policy.interval import FIRST_INTERVAL, LONG_INTERVAL, LONGEST_INTERVAL, Cadence
from tests.support.training import Loop

MB = 1_000_000


class Simulation:
    """A training loop and a store that takes one hand-over at a time, at a speed that may change.

    cost: seconds of a hand-over in addition to those of its bytes.
    """

    def __init__(
        self, cadence: Cadence, *, step_seconds: float, bandwidth: float, nbytes: int, cost: float = 0.0
    ) -> None:
        self.cadence = cadence
        self.step_seconds = step_seconds
        self.bandwidth = bandwidth
        self.nbytes = nbytes
        self.cost = cost
        self.now = 0.0
        self.step = 0
        self.handed = self.size = 0
        self.left: dict[int, tuple[float, float]] = {}  # number -> seconds and bytes to go
        self.checkpoints: list[int] = []
        self.sizes: list[int] = []
        self.intervals: list[int] = []
        self.shares: list[float] = []
        self.due = False

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            if self.due:
                self.handed += 1
                self.left[self.handed] = self.cost, self.size
                self.cadence.handed_over(self.now, self.handed, self.size)
            self._save(self.step_seconds)
            self.now += self.step_seconds
            self.step += 1
            self.due = self.cadence.due(self.now, self.step, list(self.left))
            if self.due:
                self.checkpoints.append(self.step)
                self.size = int(self.nbytes * self.cadence.share)
                self.sizes.append(self.size)
            self.intervals.append(self.cadence.interval)
            self.shares.append(self.cadence.share)
        return self

    def forget(self) -> None:
        """Discard all measurements so far."""
        for told in (self.checkpoints, self.sizes, self.intervals, self.shares):
            told.clear()

    @property
    def changes(self) -> int:
        """Return how often the share has changed."""
        return sum(a != b for a, b in zip(self.shares, self.shares[1:], strict=False))

    @property
    def pace(self) -> float:
        """Return bytes per second handed over between the first checkpoint and the last."""
        return sum(self.sizes[1:]) / ((self.checkpoints[-1] - self.checkpoints[0]) * self.step_seconds)

    def _save(self, seconds: float) -> None:
        for number in sorted(self.left):
            cost, nbytes = self.left[number]
            first = min(cost, seconds if self.bandwidth else 0.0)
            done = min(self.bandwidth * (seconds - first), nbytes)
            seconds -= first + (done / self.bandwidth if self.bandwidth else seconds)
            self.left[number] = cost - first, nbytes - done
            if nbytes - done > 1e-6 or cost > first:
                break
            del self.left[number]


def test_a_number_means_every_so_many_iterations() -> None:
    cadence = Cadence(4, checkpoint_bytes=MB)
    assert [step for step in range(1, 13) if cadence.due(0.0, step, ())] == [4, 8, 12]


@given(
    step_seconds=st.floats(0.01, 10), steps_to_save=st.floats(0.01, 400), nbytes=st.integers(10**4, 10**12)
)
@settings(max_examples=30)
def test_saving_keeps_up_with_any_store(step_seconds: float, steps_to_save: float, nbytes: int) -> None:
    cadence = Cadence(None, checkpoint_bytes=nbytes)
    bandwidth = nbytes / (steps_to_save * step_seconds)
    wanted = steps_to_save / 0.8
    run = Simulation(cadence, step_seconds=step_seconds, bandwidth=bandwidth, nbytes=nbytes)
    run.run(100 + int(15 * wanted))
    assert run.changes <= 3
    run.forget()
    run.run(200 + int(5 * wanted))
    # No queue builds up, the store's capacity is used, and checkpoints are as large as the interval allows.
    assert len(run.left) <= 2
    assert run.pace <= 0.85 * bandwidth or steps_to_save < 5  # ends are seen to half an iteration
    assert len(set(run.shares)) == 1
    assert max(run.intervals) <= 51 or cadence.share == 1 / 8
    assert cadence.share == 1 or wanted > LONG_INTERVAL / 1.25
    expected = wanted * cadence.share
    assert expected * 0.8 <= max(run.intervals) <= expected * 1.5 + 2
    assert len(set(run.intervals)) <= 2


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


@pytest.mark.parametrize(("steps", "share"), [(5, 1.0), (30, 1.0), (41, 0.5), (100, 0.25), (1000, 1 / 8)])
def test_a_budget_makes_checkpoints_smaller(steps: int, share: float) -> None:
    """The budget allows a whole checkpoint every `steps` iterations."""
    cadence = Cadence(None, checkpoint_bytes=100 * MB, max_bandwidth=100 * MB / steps)
    run = Simulation(cadence, step_seconds=1.0, bandwidth=1000 * MB, nbytes=100 * MB).run(2000)
    assert cadence.share == share
    assert cadence.interval == pytest.approx(steps * share, rel=0.3, abs=2)
    assert sum(run.sizes) <= 100 * MB / steps * 2000 + 100 * MB, "also while it looks for a size"
    run.forget()
    run.run(5000)
    assert len(set(run.shares)) == 1
    assert 0.7 * 100 * MB / steps <= run.pace <= 100 * MB / steps


def test_a_store_that_becomes_slow_and_fast_again() -> None:
    cadence = Cadence(None, checkpoint_bytes=100 * MB)
    run = Simulation(cadence, step_seconds=1.0, bandwidth=10 * MB, nbytes=100 * MB).run(500)
    assert (cadence.share, cadence.interval) == (1.0, pytest.approx(12.5, abs=3))
    for bandwidth, share in ((0.5, 1 / 8), (10, 1.0), (1.5, 1 / 4), (100, 1.0)):
        run.forget()
        run.bandwidth = bandwidth * MB
        run.run(4000)
        assert cadence.share == share
        assert run.changes <= 5
        assert len(run.left) <= 1
        run.forget()
        run.run(2000)
        assert run.changes == 0
        assert 0.6 * run.bandwidth <= run.pace <= 0.85 * run.bandwidth or cadence.interval == 1


def test_a_store_that_hangs_does_not_change_the_size() -> None:
    cadence = Cadence(None, checkpoint_bytes=100 * MB)
    run = Simulation(cadence, step_seconds=1.0, bandwidth=5 * MB, nbytes=100 * MB).run(500)
    for _ in range(4):
        run.bandwidth = 0
        run.run(500)
        run.bandwidth = 5 * MB
        run.run(1000)
    assert run.changes == 0
    assert len(run.left) <= 1


@pytest.mark.parametrize("steps", [20, 41, 60, 100, 200])
@pytest.mark.parametrize("spread", [0.2, 0.5])
def test_noise_does_not_make_the_size_flap(steps: int, spread: float) -> None:
    """This holds also where a whole checkpoint is slightly too large: at most 1 to 2 changes per 100 checkpoints."""
    rng = random.Random(steps)
    cadence = Cadence(None, checkpoint_bytes=100 * MB)
    bandwidth = 100 * MB / steps
    run = Simulation(cadence, step_seconds=1.0, bandwidth=bandwidth, nbytes=100 * MB).run(4000)
    run.forget()
    for _ in range(1000):
        run.bandwidth = bandwidth * rng.lognormvariate(-spread * spread / 2, spread)
        run.run(10)
    assert run.changes <= (0.02 if spread < 0.3 else 0.04) * len(run.checkpoints)
    assert len(run.left) <= 3
    assert run.pace <= 0.85 * bandwidth


def test_checkpoints_that_cost_time_whatever_their_size_stay_large() -> None:
    cadence = Cadence(None, checkpoint_bytes=100 * MB)
    run = Simulation(cadence, step_seconds=1.0, bandwidth=1000 * MB, nbytes=100 * MB, cost=50.0).run(20_000)
    assert run.shares.count(1.0) > 0.9 * len(run.shares)
    assert 1 / 4 not in run.shares
    assert len(run.left) <= 1
    # Now hand-overs have no fixed cost, but bytes are slow: the interval adapts.
    run.cost, run.bandwidth = 0.0, 2 * MB
    run.run(20_000)
    assert cadence.share == 1 / 2


def test_a_whole_state_cannot_be_made_smaller() -> None:
    cadence = Cadence(None, checkpoint_bytes=100 * MB, divisible=False)
    Simulation(cadence, step_seconds=1.0, bandwidth=MB, nbytes=100 * MB).run(2000)
    assert (cadence.share, cadence.interval) == (1.0, pytest.approx(125, abs=35))


def test_a_store_that_is_slow_from_the_start() -> None:
    run = Simulation(Cadence(None, checkpoint_bytes=MB), step_seconds=1.0, bandwidth=MB / 500, nbytes=MB)
    run.run(499)
    assert len(run.left) <= 6


def test_a_checkpoint_without_bytes_says_nothing() -> None:
    cadence = Cadence(None, checkpoint_bytes=MB)
    run = Simulation(cadence, step_seconds=1.0, bandwidth=MB / 10, nbytes=MB).run(300)
    before = cadence.bandwidth, cadence.interval
    while run.left or run.due:
        run.run(1)
    cadence.handed_over(run.now, 1000, 0)
    for waiting in ([1000], [1000], []):
        run.now += 1.0
        run.step += 1
        run.due = cadence.due(run.now, run.step, waiting)
    assert cadence.bandwidth == pytest.approx(before[0], rel=0.2)
    assert abs(cadence.interval - before[1]) <= 2


def test_a_fixed_interval_forgets_what_the_store_has() -> None:
    cadence = Cadence(2, checkpoint_bytes=MB)
    for number in range(100):
        cadence.handed_over(float(number), number, MB)
        cadence.due(float(number), number + 1, [number])
    assert list(cadence.waiting) == [99]
    cadence.due(100.0, 101, [])
    assert not cadence.waiting


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
    assert len(run.left) <= 5
    run.bandwidth = 5 * MB
    run.run(3000)
    assert cadence.interval <= usual + 1
    assert cadence.share == 1
    assert len(run.left) <= 1


def test_one_long_pause_is_no_long_step() -> None:
    cadence = Cadence(None, checkpoint_bytes=MB)
    run = Simulation(cadence, step_seconds=0.1, bandwidth=1 * MB, nbytes=MB).run(300)
    before = cadence.interval
    run.now += 600  # an evaluation, during which the store continues
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


def test_settings_from_text(tmp_path: Path) -> None:
    assert SessionSettings(store="s").interval == "auto"
    assert SessionSettings(store="s").overhead == 0.01
    environ = {"SCARCTL_INTERVAL": "7", "SCARCTL_OVERHEAD": "2%"}
    found = SessionSettings.resolve({"store": "s"}, environ=environ, folder=tmp_path)
    assert (found.interval, found.overhead) == (7, 0.02)
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
        {"interval": "auto", "max_bandwidth": 0},
        {"interval": "auto", "max_bandwidth": float("nan")},
        {"interval": "auto", "max_bandwidth": "fast"},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SessionSettings(store="s", **bad)  # type: ignore[arg-type]


class Clock:
    """A clock set by hand: on a busy machine the real one shows little."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_session_finds_its_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(scarctl.checkpoint.pace, "time", clock)
    loop = Loop(tmp_path / "store", interval="auto", overhead=1.0, fraction=0.25, on_error="raise")

    def train(steps: int) -> None:
        for _ in range(steps):
            clock.now += 1.0
            loop.train(1, settle=True)

    train(20)
    engine = loop.session._engine
    assert engine is not None
    # Everything is durable before the next step, so every iteration may save.
    assert engine.cadence.bandwidth is not None
    assert engine.cadence.interval == 1
    before = loop.session.stats.checkpoints
    train(20)
    assert loop.session.stats.checkpoints == before + 20
    loop.session.close()


def test_a_session_that_compares_ahead_soon_knows_an_undisturbed_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distances are computed in the 16 iterations before a checkpoint: in all of them, if checkpoints are frequent."""
    clock = Clock()
    monkeypatch.setattr(scarctl.checkpoint.pace, "time", clock)
    monkeypatch.setattr(scarctl.checkpoint.tracker, "SMALL", 0)
    loop = Loop(
        tmp_path / "store",
        interval="auto",
        overhead=1.0,
        fraction=0.25,
        tracker="overlapped",
        on_error="raise",
    )
    loop.train(1)
    engine = loop.session._engine
    assert engine is not None
    with (
        engine.nothing_saved()
    ):  # the store takes long for the first state, so that these iterations are not quiet
        for _ in range(25):
            clock.now += 1.0
            loop.train(1)
    for _ in range(25):
        clock.now += 1.0
        loop.train(1, settle=True)
    assert engine.tracker.overlaps
    assert not engine.cadence.overhead.probing
    loop.session.close()


def test_a_session_stays_within_its_budget(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval="auto", max_bandwidth=1e-3, on_error="raise")
    loop.train(30)
    engine = loop.session._engine
    assert engine is not None
    assert engine.cadence.interval == LONGEST_INTERVAL
    assert loop.session.stats.checkpoints == 1
    loop.session.close()


def test_a_session_makes_smaller_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path / "store", interval=1, fraction=0.5, partition_bytes=64, on_error="raise")
    loop.train(2, settle=True)
    engine = loop.session._engine
    assert engine is not None
    sizes: list[int] = []
    monkeypatch.setattr(
        engine.cadence, "handed_over", lambda now, number, nbytes, regular: sizes.append(nbytes)
    )
    for share in (1.0, 0.5, 1 / 8):
        engine.cadence.share = share
        loop.train(4, settle=True)  # credit left by smaller ones is used up
        sizes.clear()
        loop.train(8, settle=True)
        assert len(sizes) == 8
        assert sum(sizes) / 8 == pytest.approx(engine.budget * share, rel=0.2)
    loop.session.close()
