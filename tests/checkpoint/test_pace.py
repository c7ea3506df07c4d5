"""Test when the store's turn is, alone, at a fixed interval, and among ranks, and what is said about the pace."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.checkpoint import pace as module
from scarctl.checkpoint.pace import TURN, Pace
from scarctl.checkpoint.selector import LAG, Selector
from scarctl.config import SessionSettings
from scarctl.policy.turns import Turn
from scarctl.state.caveats import Caveats
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack

LAYOUT = build_layout([("w", "parameter", (TensorSpec("", "F32", (100, 250)),))], rows={"w": 1})
STATE = LAYOUT.nbytes  # 100 kB
NOTHING, PART, WHOLE = Turn.NOTHING, Turn.PART, Turn.WHOLE


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Run:
    """One rank, whose memory changes completely between checkpoints, which cost `cost` seconds."""

    def __init__(self, *, ranks: bool = False, cost: float = 0.01, **options: Any) -> None:
        settings = SessionSettings(store="s", fraction=0.1, **options)
        self.arena, self.caveats = Arena.anonymous(LAYOUT), Caveats()
        self.arena.slot.end(np.arange(LAYOUT.partitions), pack(1, 1), 1)
        self.selector, self.cost = Selector(), cost
        self.selector.shared = ranks
        self.pace = Pace(
            settings,
            STATE,
            STATE // 10,
            self.selector,
            self.arena,
            self.caveats,
        )

    def checkpoint(self, step: int) -> Turn:
        """Make the checkpoint that is due, and ask for what its turn says."""
        turn = self.pace.turn(step)
        self.pace.cadence.spent(self.cost, 0.0)
        if turn is not NOTHING:
            number = self.arena.ask(whole=True)
            self.pace.asked(number, STATE if turn is WHOLE else STATE // 10, step, turn)
        return turn

    def saved(self) -> None:
        """Note that everything is durable."""
        self.arena.serve(self.arena.asked)

    def step(self, step: int) -> Turn | None:
        """Return the turn of the step's checkpoint; None if none is due."""
        return self.checkpoint(step) if self.pace.due(step) else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def train(run: Run, clock: Clock, steps: int, *, first: int = 1, saves: bool = True) -> dict[int, Turn]:
    """Take steps of a second. saves: what waits is durable before the next. Return the turns of due checkpoints."""
    found = {}
    for step in range(first, first + steps):
        clock.now += 1.0
        turn = run.step(step)
        if turn is not None:
            found[step] = turn
        if saves:
            run.saved()
    return found


def test_memory_follows_its_cost_and_the_store_max_lag(clock: Clock) -> None:
    found = train(Run(), clock, 100)
    assert len(found) == 99
    wholes = [step for step, turn in found.items() if turn is WHOLE]
    assert np.diff(wholes).tolist() == [30, 30, 30]
    assert PART not in found.values()


def test_a_fixed_interval_gives_parts_at_its_multiples_only(clock: Clock) -> None:
    found = train(Run(interval=10), clock, 60)
    assert {step for step, turn in found.items() if turn is PART} == {10, 20, 30, 40, 50, 60}
    assert {turn for step, turn in found.items() if step % 10} == {NOTHING}


def test_a_store_that_fails_is_not_said_to_be_slow(clock: Clock) -> None:
    run = Run(interval=10)
    run.pace.turns.bandwidth = 1e6
    run.arena.ask(whole=True)
    run.arena.count_failed_save()
    train(run, clock, 500, saves=False)
    assert [caveat.kind for caveat in run.caveats] == []
    run.saved()
    train(run, clock, 500, first=501, saves=False)
    assert [caveat.kind for caveat in run.caveats] == ["behind"]


def test_a_fixed_interval_waits_for_a_store_that_has_a_whole_state_to_save(clock: Clock) -> None:
    run = Run(interval=10)
    found = train(run, clock, 200, saves=False)
    assert sum(turn is PART for turn in found.values()) == 10
    assert (run.pace.lag(200), run.pace.turn_steps) == (190, 100)
    run.saved()
    assert train(run, clock, 10, first=201)[210] is PART
    assert run.pace.lag(211) == 0, "it has been saved since the last look"


def test_policy_full_is_whole_when_nothing_waits(clock: Clock) -> None:
    run = Run(interval=10, policy="full")
    assert train(run, clock, 20)[20] is WHOLE
    found = train(run, clock, 20, first=21, saves=False)
    assert (found[30], found[40]) == (WHOLE, NOTHING)
    assert run.pace.turn_steps == 10


class Ranks:
    """Ranks whose wishes reach all others `LAG` checkpoints later."""

    def __init__(self, count: int, **options: Any) -> None:
        self.runs = [Run(ranks=True, **options) for _ in range(count)]
        self.rounds: deque[Turn] = deque()

    def checkpoint(self, step: int) -> set[Turn]:
        agreed = self.rounds.popleft() if len(self.rounds) >= LAG else NOTHING
        for run in self.runs:
            run.selector.turn = agreed
        found = {run.checkpoint(step) for run in self.runs}
        self.rounds.append(min(run.selector.wants for run in self.runs))
        return found


def test_ranks_take_the_turn_that_all_of_them_want_and_take_it_once(clock: Clock) -> None:
    ranks, given, waited = Ranks(3), dict[int, Turn](), set[int]()
    slow = ranks.runs[2]
    for step in range(1, 300):
        clock.now += 1.0
        (turn,) = ranks.checkpoint(step)
        if turn is not NOTHING:
            given[step] = turn
        for run in ranks.runs:
            if run is not slow or step % 40 == 0:
                run.saved()
            waiting = [n for n in run.pace.turns.waiting if n > run.arena.served]
            run.pace.turns.look(clock.now, waiting)
        if slow.arena.waits:
            waited.add(step)
    assert given.pop(1 + LAG) is WHOLE
    assert len(given) > 3
    assert set(given.values()) == {PART}, "the slow one takes no whole state in time"
    assert not waited & {step - 1 - LAG for step in given}, "when it has saved, and everyone knows"


def test_ranks_take_a_turn_as_soon_as_all_can_know_of_the_one_before(clock: Clock) -> None:
    ranks = Ranks(2, max_bandwidth=STATE / 40)
    given = []
    for step in range(1, 200):
        clock.now += 1.0
        for run in ranks.runs:
            assert run.pace.due(step) == (step > 1)
        if ranks.checkpoint(step) == {PART}:
            given.append(step)
        for run in ranks.runs:
            run.saved()
    # A part, which is a tenth of the state, takes four seconds.
    assert given[0] <= 1 + LAG + 40 + 1
    assert set(np.diff(given)) == {4}


def test_a_store_that_gets_old_copies_of_a_large_state_is_said_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(max_bandwidth=STATE / 1000)
    train(run, clock, 50)
    [caveat] = run.caveats
    assert caveat.kind == TURN
    assert "the store takes 16.7 min for all that has changed, more than 10 min" in caveat.message
    assert "because max_bandwidth=100 B/s allows no more" in caveat.message
    [said] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said.getMessage().endswith("Give a larger max_bandwidth")


def test_checkpoints_that_cost_too_much_are_said_until_they_no_longer_do(clock: Clock) -> None:
    run = Run(cost=2.0)
    train(run, clock, 2000)
    [caveat] = run.caveats
    assert "costs 2 s of training, so they are 100 s apart, more than max_loss=30 s" in caveat.message
    run.cost = 0.1
    train(run, clock, 2000, first=2001)
    assert not list(run.caveats)


def test_the_pace_is_logged_once_and_again_when_it_has_changed(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="scarctl")
    run = Run(cost=0.1)
    train(run, clock, 500)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "memory has a whole checkpoint every 10 s; one costs 100 ms of training" in said
    assert "The store gets the whole state every 30 s: up to 274.7 MiB" in said
    caplog.clear()
    run.cost = 0.5
    train(run, clock, 1000, first=501)
    assert len(caplog.records) == 1
