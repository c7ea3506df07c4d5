"""Test the gate between an optimizer's steps and a flush, with threads and without training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from scarctl.session.gate import Gate
from tests.support.waiting import wait_until


def test_the_gate_waits_until_the_loop_declares_the_step_or_comes_back() -> None:
    gate = Gate(stepping=False)
    opened: list[float] = []

    def flush() -> None:
        with gate.quiet(60.0) as quiet:
            assert quiet
            opened.append(time.monotonic())

    for comes_back in (False, True):
        gate.enter()
        thread = threading.Thread(target=flush)
        thread.start()
        wait_until(lambda: gate._wanted)
        assert not opened
        gate.leave(declared=False)
        time.sleep(0.1)
        assert not opened
        if comes_back:
            gate.enter()  # waits for the flush
            assert gate.stepping
        gate.leave()
        thread.join()
        assert opened.pop()


def test_a_step_that_is_never_declared_is_let_through_in_time() -> None:
    """Its parameters are complete: only what the loop does after the step is unknown."""
    gate = Gate(stepping=False)
    gate.enter()
    gate.leave(declared=False)
    found: list[bool] = []

    def flush() -> None:
        with gate.quiet(0.2) as quiet:
            found.append(quiet)

    thread = threading.Thread(target=flush)
    thread.start()
    thread.join()
    assert found == [True]


def test_a_step_of_a_thread_that_has_died_is_not_waited_for() -> None:
    gate = Gate(stepping=False)
    trainer = threading.Thread(target=gate.enter)
    trainer.start()
    trainer.join()
    began = time.monotonic()
    with gate.quiet(60.0) as quiet:
        assert not quiet
    assert time.monotonic() - began < 30


def test_the_gate_gives_up_on_a_step_that_does_not_end() -> None:
    gate = Gate(stepping=False)
    gate.enter()
    found: list[bool] = []

    def flush(timeout: float) -> None:
        with gate.quiet(timeout) as quiet:
            found.append(quiet)

    for end in (False, True):
        thread = threading.Thread(target=flush, args=[60.0 if end else 0.05])
        thread.start()
        if end:
            gate.end()
        thread.join()
        assert found.pop() is False


def test_ctrl_c_right_before_a_block_leaves_none_behind() -> None:
    gate = Gate(stepping=True)

    taken = gate._changed

    class Lock:
        """The gate's lock, whose release Ctrl-C interrupts once."""

        def __enter__(self) -> None:
            taken.__enter__()

        def __exit__(self, *error: object) -> None:
            gate._changed = taken
            taken.__exit__(None, None, None)
            raise KeyboardInterrupt

        def wait_for(self, ready: Callable[[], bool]) -> bool:
            return ready()

    gate._changed = Lock()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), gate.block():
        raise AssertionError("it never begins")
    with gate.block():
        gate.enter()
        gate.leave()
    assert not gate.stepping
    assert not gate.torn
