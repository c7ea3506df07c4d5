"""Test the reaction to a signal as a pure state machine, without sending signals."""

from __future__ import annotations

import signal

import pytest

from scarctl.session.signals import Let, Machine, Phase, Remind, Save

TERM, INT = signal.SIGTERM, signal.SIGINT


def test_a_signal_is_let_through_when_all_is_saved() -> None:
    machine = Machine()
    assert machine.came(TERM, 0.0) == [Save(TERM)]
    assert machine.ran(TERM, False, 0.1) == []
    assert machine.saved(1.0) == [Let((TERM,))]
    machine.sent(TERM)
    assert machine.came(TERM, 1.0) == []
    assert machine.ran(TERM, True, 1.0) == []
    assert machine.phase is Phase.QUIET
    assert machine.came(TERM, 9.0) == [Save(TERM)]


def test_the_handler_alone_tells_of_a_signal_when_the_wakeup_file_is_not_ours() -> None:
    machine = Machine()
    assert machine.ran(INT, False, 0.0) == [Save(INT)]
    assert machine.ran(INT, False, 0.1) == [], "together with the first"
    assert machine.ran(INT, False, 1.0) == [Let((INT,), at_once=True)]
    machine.sent(INT)
    assert machine.ran(INT, True, 1.0) == []
    assert machine.phase is Phase.QUIET
    assert machine.saved(2.0) == [], "the callbacks have been overtaken"


@pytest.mark.parametrize("late", [False, True], ids=["before its echo", "after its echo"])
def test_a_main_thread_that_comes_back_late_runs_the_handler_once(late: bool) -> None:
    machine = Machine()
    machine.came(TERM, 0.0)
    machine.saved(1.0)
    machine.sent(TERM)
    # One run for the signal and its echo together, or one for each.
    if late:
        assert machine.came(TERM, 1.0) == []
        assert machine.ran(TERM, True, 5.0) == []
    else:
        assert machine.ran(TERM, True, 1.0) == []
        assert machine.came(TERM, 1.0) == []
        assert machine.ran(TERM, False, 1.0) == []
    assert machine.phase is Phase.QUIET


def test_another_signal_at_the_same_time_is_not_lost() -> None:
    machine = Machine()
    machine.came(INT, 0.0)
    assert machine.came(TERM, 0.1) == []
    assert machine.saved(0.15) == [Let((INT, TERM))]
    assert machine.came(TERM, 0.2) == []
    assert machine.came(TERM, 1.0) == [Let((INT, TERM), at_once=True)]


def test_callbacks_that_do_not_return_do_not_hold_up_a_signal_for_ever() -> None:
    machine = Machine()
    machine.came(TERM, 0.0)
    assert machine.tick(100.0) == []
    assert machine.tick(121.0) == [Let((TERM,))]


def test_a_signal_whose_handler_does_not_run_is_sent_once_more() -> None:
    machine = Machine()
    machine.came(INT, 0.0)
    machine.saved(5.0)
    machine.sent(INT)
    assert machine.came(INT, 5.0) == []
    assert machine.tick(5.5) == []
    assert machine.tick(6.0) == [Remind((INT,))]
    machine.sent(INT)
    assert machine.came(INT, 6.0) == [], "no second signal"
    assert machine.tick(9.0) == [], "the main thread may be in a call that no signal may disturb"
    assert machine.ran(INT, True, 9.0) == []
    assert machine.phase is Phase.QUIET
    assert machine.came(INT, 20.0) == [Save(INT)]
    machine.saved(21.0)
    assert machine.tick(22.0) == [Remind((INT,))]
