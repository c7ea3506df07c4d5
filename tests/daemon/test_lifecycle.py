"""Test when the daemon releases runs and when it ends, without processes or a clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scarctl.daemon.lifecycle import (
    BETWEEN,
    LAST_SAVES,
    LAST_WORDS,
    LINGER,
    RETURN,
    Exit,
    Instruction,
    Lifecycle,
    Phase,
    Release,
)


@pytest.fixture
def life() -> Lifecycle:
    life = Lifecycle()
    life.attached("a")
    return life


def test_a_closed_run_is_let_go_and_the_daemon_ends_a_moment_later(life: Lifecycle) -> None:
    assert life.detached("a") == [Release("a")]
    assert life.runs == {"a": Phase.CLOSING}
    assert life.tick(100.0) == []
    assert life.released("a") == []
    assert life.tick(101.0) == []
    assert life.tick(101.0 + BETWEEN / 2) == []
    assert life.tick(101.0 + BETWEEN) == [Exit()]
    assert life.stopping


def test_a_dead_run_is_kept_until_it_is_durable(life: Lifecycle) -> None:
    assert life.settled("a") == []
    life.trainer_gone("a")
    assert life.tick(1e9) == []
    assert life.settled("a") == [Release("a")]
    assert life.settled("a") == []
    life.trainer_gone("a")
    assert life.runs == {"a": Phase.CLOSING}


def test_after_a_death_the_daemon_waits_for_a_process_that_comes_back(life: Lifecycle) -> None:
    life.attached("b")
    life.trainer_gone("a")
    life.settled("a")
    life.released("a")
    life.detached("b")
    life.released("b")
    assert life.tick(10.0) == []
    assert life.tick(9.9 + RETURN) == []
    assert life.tick(10.0 + RETURN) == [Exit()]


def test_a_daemon_that_keeps_a_copy_for_another_host_stays(life: Lifecycle) -> None:
    life.detached("a")
    life.released("a")
    assert life.tick(10.0, hosting=True) == []
    assert life.tick(1e6, hosting=True) == []
    assert life.tick(1e6 + 1) == []
    assert life.tick(1e6 + 1 + BETWEEN) == [Exit()]


def test_a_daemon_whose_memory_may_be_fetched_stays_while_it_is_wanted(life: Lifecycle) -> None:
    life.detached("a")
    life.released("a")
    life.tick(10.0)
    for minute in range(3):
        assert life.tick(10.0 + BETWEEN + minute * RETURN, wanted=lambda: True) == []
    asked = 10.0 + BETWEEN + 2 * RETURN
    assert life.tick(asked + RETURN / 2, wanted=lambda: pytest.fail("it is asked once a minute")) == []
    assert life.tick(asked + RETURN, wanted=lambda: False) == [Exit()]


def test_a_signal_ends_it_although_its_memory_may_be_fetched(life: Lifecycle) -> None:
    life.detached("a")
    life.released("a")
    life.tick(10.0, wanted=lambda: True)
    assert life.terminate(11.0) == [Exit()]


def test_a_signal_ends_it_although_it_keeps_a_copy(life: Lifecycle) -> None:
    life.detached("a")
    life.released("a")
    life.tick(10.0, hosting=True)
    assert life.terminate(11.0) == [Exit()]


def test_who_came_back_and_left_is_not_waited_for(life: Lifecycle) -> None:
    life.trainer_gone("a")
    life.detached("a")
    life.released("a")
    life.attached("a")
    life.detached("a")
    life.released("a")
    assert life.tick(10.0) == []
    assert life.tick(10.0 + BETWEEN) == [Exit()]


def test_a_new_run_starts_the_time_anew(life: Lifecycle) -> None:
    life.detached("a")
    life.released("a")
    life.tick(10.0)
    life.attached("b")
    life.detached("b")
    life.released("b")
    assert life.tick(20.0) == []
    assert life.tick(20.0 + BETWEEN) == [Exit()]


def test_stopping_waits_for_what_is_being_written(life: Lifecycle) -> None:
    life.attached("b")
    life.detached("b")
    assert life.stop() == [Release("a")]
    assert life.stop() == []
    assert life.released("b") == []
    assert life.released("a") == [Exit()]


def test_without_a_run_it_ends_soon() -> None:
    life = Lifecycle()
    assert life.tick(1.0) == []
    assert life.tick(1.0 + LINGER) == [Exit()]


def test_a_signal_without_a_run_ends_it_at_once() -> None:
    assert Lifecycle().terminate(7.0) == [Exit()]


def test_a_signal_to_all_leaves_time_for_what_dying_processes_still_say(life: Lifecycle) -> None:
    assert life.terminate(10.0) == []
    assert life.tick(10.0 + LAST_WORDS - 0.1) == []
    life.trainer_gone("a")
    assert life.tick(10.0 + LAST_WORDS) == [], "it is saved now, which may take longer"
    assert life.tick(10.0 + LAST_SAVES - 0.1) == []
    assert life.settled("a") == [Release("a")]
    assert life.released("a") == []
    assert life.tick(10.0 + LAST_SAVES - 0.05) == [Exit()]


def test_a_signal_to_the_daemon_alone_ends_it_beside_a_process_that_goes_on(life: Lifecycle) -> None:
    life.terminate(10.0)
    assert life.tick(10.0 + LAST_WORDS) == [Release("a")]
    assert life.stopping
    assert life.released("a") == [Exit()]


def test_a_signal_does_not_wait_for_ever_for_a_slow_store(life: Lifecycle) -> None:
    life.terminate(10.0)
    life.trainer_gone("a")
    assert life.tick(10.0 + LAST_SAVES) == [Release("a")]
    assert life.released("a") == [Exit()]


def test_a_process_may_still_start_while_others_end(life: Lifecycle) -> None:
    life.terminate(10.0)
    life.trainer_gone("a")
    assert not life.stopping
    life.attached("b")
    assert life.tick(10.0 + LAST_WORDS) == [Release("a"), Release("b")]


def test_held_for_a_run_that_comes() -> None:
    life = Lifecycle()
    life.hold(60.0)
    assert life.tick(1.0) == []
    assert life.tick(59.0) == []
    life.attached("a")
    life.detached("a")
    life.released("a")
    assert life.tick(59.1) == []
    assert life.tick(59.1 + BETWEEN) == [Exit()], "a run has come and gone: nobody waits any more"


def test_held_in_vain_or_no_longer() -> None:
    life = Lifecycle()
    life.hold(60.0)
    life.tick(1.0)
    assert life.tick(60.0) == [Exit()]
    life = Lifecycle()
    life.hold(60.0)
    life.tick(1.0)
    life.hold(2.0)
    assert life.tick(2.0) == [Exit()]


@pytest.mark.parametrize("event", ["trainer_gone", "settled", "detached", "released"])
def test_nothing_is_done_for_a_run_that_is_not_there(life: Lifecycle, event: str) -> None:
    assert not getattr(life, event)("x")
    assert life.runs == {"a": Phase.ATTACHED}


RUNS = st.sampled_from(["a", "b", "c"])


class Model(RuleBasedStateMachine):
    """Training processes that start, close, die and are replaced, and a daemon that must release each exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle()
        self.now = 0.0
        self.runs: dict[str, str] = {}
        self.releasing: set[str] = set()
        self.expected: set[str] = set()
        self.busy_until = 0.0
        """The last moment with a run, or until which a command reserves the daemon for one."""
        self.terminated: float | None = None
        """The time of a SIGTERM."""
        self.stopping = self.ended = False

    def send(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert not self.ended, "an instruction after the end"
            if isinstance(instruction, Release):
                assert instruction.run in self.expected, "let go though its training process lives"
                assert instruction.run not in self.releasing, "let go twice"
                self.expected.discard(instruction.run)
                self.releasing.add(instruction.run)
                self.runs[instruction.run] = "closing"
            elif isinstance(instruction, Exit):
                assert self.runs == {}, "ended while a run was there"
                self.ended = True
        assert not self.expected, "not let go"

    @precondition(lambda self: not (self.ended or self.stopping))
    @rule(run=RUNS)
    def attach(self, run: str) -> None:
        if run not in self.runs:
            self.runs[run] = "attached"
            self.busy_until = self.now
            self.life.attached(run)

    @rule(run=RUNS)
    def close(self, run: str) -> None:
        if self.runs.get(run) in ("attached", "orphaned"):
            self.expected.add(run)
        self.send(self.life.detached(run))

    @rule(run=RUNS)
    def trainer_dies(self, run: str) -> None:
        if self.runs.get(run) == "attached":
            self.runs[run] = "orphaned"
        self.life.trainer_gone(run)

    @rule(run=RUNS)
    def settles(self, run: str) -> None:
        if self.runs.get(run) == "orphaned":
            self.expected.add(run)
        self.send(self.life.settled(run))

    @precondition(lambda self: self.releasing)
    @rule(data=st.data())
    def released(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.releasing)))
        self.releasing.discard(run)
        del self.runs[run]
        self.busy_until = max(self.busy_until, self.now)
        self.send(self.life.released(run))
        assert self.ended == (self.stopping and not self.runs)

    @rule(seconds=st.floats(0, 30))
    def hold(self, seconds: float) -> None:
        if not self.ended:
            self.busy_until = self.now + seconds
            self.life.hold(self.now + seconds)

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.end_if_terminated()
        self.send(self.life.tick(self.now))
        if not self.runs and self.now >= self.busy_until:
            self.send(self.life.tick(self.now + self.life.patience))
            assert self.ended, "nobody needs it any more"

    @rule(sure=st.integers(0, 7))
    def sigterm(self, sure: int) -> None:
        if sure == 0 and not self.ended:
            if self.terminated is None:
                self.terminated = self.now
            self.end_if_terminated()
            self.send(self.life.terminate(self.now))

    def end_if_terminated(self) -> None:
        """Check that a SIGTERM stops the daemon without runs, or after a time that depends on the trainers left."""
        if self.terminated is None or self.stopping or self.ended:
            return
        patience = LAST_WORDS if "attached" in self.runs.values() else LAST_SAVES
        if not self.runs or self.now >= self.terminated + patience:
            self.stopping = True
            self.expected |= {run for run, phase in self.runs.items() if phase != "closing"}

    @rule(sure=st.integers(0, 7))
    def stop(self, sure: int) -> None:
        if sure == 0 and not self.ended:
            self.stopping = True
            self.expected |= {run for run, phase in self.runs.items() if phase != "closing"}
            self.send(self.life.stop())
            assert self.ended == (not self.runs)

    @invariant()
    def it_knows_what_there_is(self) -> None:
        assert {run: phase.value for run, phase in self.life.runs.items()} == self.runs
        assert self.life.stopping or not (self.stopping or self.ended), "nobody may come any more"


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestModel = Model.TestCase
