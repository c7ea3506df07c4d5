"""Test the gate between an optimizer's steps and a flush, with threads and without training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from scarctl.session.gate import SETTLE, Gate
from tests.support.waiting import wait_until


def test_the_gate_waits_for_the_loop_to_settle_or_to_come_back() -> None:
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
        left = time.monotonic()
        gate.leave(50.0 if comes_back else SETTLE)
        if comes_back:
            gate.enter()  # waits for the flush
            assert gate.stepping
            gate.leave()
        thread.join()
        waited = opened.pop() - left
        assert waited < 40 if comes_back else waited >= SETTLE


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
