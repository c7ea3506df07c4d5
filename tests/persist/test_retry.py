"""Test the state machine, without files, threads or a clock."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scarctl.persist.retry import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Halt,
    Instruction,
    Machine,
    Persist,
    Phase,
    Stopped,
    Wake,
)


def test_one_at_a_time_and_then_the_newest() -> None:
    machine = Machine()
    assert machine.asked(4) == [Persist(4)]
    assert machine.asked(7) == []
    assert machine.asked(9) == []
    assert machine.persisted(4) == [Persist(9)]
    assert machine.persisted(9) == []
    assert machine.phase is Phase.IDLE
    assert machine.waiting == 0


def test_pauses_grow_to_a_bound_and_start_again_after_a_success() -> None:
    machine = Machine()
    machine.asked(1)
    pauses = []
    for _ in range(40):
        (wake,) = machine.failed(100.0, retryable=True, jitter=1.0)
        assert isinstance(wake, Wake)
        pauses.append(round(wake.at - 100.0, 6))
        assert machine.tick(wake.at) == [Persist(1)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert pauses == sorted(pauses)
    assert machine.asked(2) == []
    assert machine.persisted(1) == [Persist(2)]
    (wake,) = machine.failed(0.0, retryable=True, jitter=1.0)
    assert wake == Wake(FIRST_PAUSE)


def test_jitter_at_most_halves_a_pause() -> None:
    machine = Machine()
    machine.asked(1)
    assert machine.failed(0.0, retryable=True, jitter=0.0) == [Wake(FIRST_PAUSE / 2)]


def test_somebody_who_waits_ends_the_pause() -> None:
    machine = Machine()
    machine.asked(1)
    machine.failed(0.0, retryable=True)
    assert machine.hurry() == [Persist(1)]


def test_what_will_not_pass_halts_and_keeps_what_waits() -> None:
    machine = Machine()
    machine.asked(1)
    assert machine.failed(0.0, retryable=False) == [Halt()]
    assert machine.asked(3) == []
    assert machine.hurry() == []
    assert machine.waiting == 3
    assert machine.stop() == [Stopped()]


def test_stopping_lets_what_is_being_written_finish() -> None:
    machine = Machine()
    machine.asked(1)
    assert machine.stop() == []
    assert machine.asked(2) == []
    assert machine.persisted(1) == [Stopped()]
    assert machine.waiting == 2


class Model(RuleBasedStateMachine):
    """Requests, a store that fails now and then, and the machine between them."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.now = 0.0
        self.newest = self.done = 0
        self.busy: int | None = None
        self.wake: float | None = None
        self.halted = self.stopping = self.stopped = False

    def send(self, instructions: list[Instruction]) -> None:
        self.wake = None  # the newest answer determines when to wake
        for instruction in instructions:
            assert not self.stopped, "an instruction after the end"
            match instruction:
                case Persist(number):
                    assert self.busy is None
                    assert not self.halted
                    assert self.done < number <= self.newest
                    self.busy = number
                case Wake(at):
                    assert self.now <= at <= self.now + LONGEST_PAUSE
                    self.wake = at
                case Halt():
                    self.halted = True
                case Stopped():
                    assert self.busy is None
                    self.stopped = True

    @rule()
    def ask(self) -> None:
        self.newest += 1
        self.send(self.machine.asked(self.newest))

    @precondition(lambda self: self.busy is not None)
    @rule()
    def succeeds(self) -> None:
        assert self.busy is not None
        number, self.busy = self.busy, None
        self.done = number
        self.send(self.machine.persisted(number))

    @precondition(lambda self: self.busy is not None)
    @rule(retryable=st.sampled_from([True, True, True, False]), jitter=st.floats(0, 0.999))
    def fails(self, retryable: bool, jitter: float) -> None:
        assert self.busy is not None
        self.busy = None
        self.send(self.machine.failed(self.now, retryable=retryable, jitter=jitter))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.wake is not None and self.now >= self.wake:
            self.send(self.machine.tick(self.now))

    @rule()
    def hurry(self) -> None:
        self.send(self.machine.hurry())

    @precondition(lambda self: not self.stopping)
    @rule(sure=st.integers(0, 5))
    def stop(self, sure: int) -> None:
        if sure == 0:
            self.stopping = True
            self.send(self.machine.stop())

    @invariant()
    def nothing_is_lost_and_nothing_is_forgotten(self) -> None:
        assert self.machine.waiting == (self.newest if self.newest > self.done else 0)
        if self.newest > self.done and not (self.halted or self.stopped):
            assert self.busy is not None or self.wake is not None, "nobody will ever come back"


Model.TestCase.settings = settings(max_examples=30, stateful_step_count=40)
TestModel = Model.TestCase
