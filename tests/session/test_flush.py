"""Test the state that is flushed on a signal, an exception, a call, or the end of the program, in real processes."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import scarctl
import scarctl.session.departure
from scarctl.errors import UsageError
from scarctl.session import signals
from tests.session.flushed import STEPS, assert_goes_on_exactly, half_an_iteration, trained
from tests.support import stepper
from tests.support.forkserver import Program
from tests.support.process import Forked, Tell, end_by_signal
from tests.support.training import Loop

# -- a signal ends the process -----------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("one_thread")


def computes() -> None:
    for _ in itertools.count():
        pass


def sleeps() -> None:
    while True:
        time.sleep(600)


def is_stuck() -> None:
    """Hang in a call that does not return, whatever signals arrive."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@pytest.mark.parametrize("blocked", [computes, is_stuck])
def test_sigterm(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor], blocked: Callable[[], None]
) -> None:
    def body(tell: Tell) -> None:
        loop = trained(tmp_path / "store")
        tell("ready")
        blocked()
        del loop

    end_by_signal(body)
    assert_goes_on_exactly(tmp_path / "store", expected)


# -- steps -------------------------------------------------------------------------------------------------------


class Slow(stepper.Stepper):
    """Leaves parameters half changed for a while."""

    seconds = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("count", torch.zeros_like(p))
                count.add_(1)
                p[:, ::2] += 1
        time.sleep(self.seconds)
        for group in self.param_groups:
            for p in group["params"]:
                p[:, 1::2] += 1


@pytest.mark.parametrize("seconds", [0.5, 600.0], ids=["that ends", "that does not"])
def test_sigterm_in_the_middle_of_a_step(
    tmp_path: Path, both_savers: str, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(scarctl.session.departure, "FLUSH_SECONDS", 5.0 if seconds < 1 else 0.5)

    def body(tell: Tell) -> None:
        model, _ = stepper.build()
        optimizer = Slow(model.parameters())
        session = stepper.attach(model, optimizer, str(tmp_path / "store"))
        for _ in range(4):
            optimizer.step()
        session.checkpoint(full=True)
        Slow.seconds = seconds
        threading.Timer(0.1, tell, ["ready"]).start()
        optimizer.step()
        sleeps()

    end_by_signal(body)
    model, _ = stepper.build()
    optimizer = Slow(model.parameters())
    session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    resumed = session.resume()
    assert (resumed.step, resumed.consistent) == (5 if seconds < 1 else 4, True)
    assert stepper.torn_rows(model, optimizer) == []  # type: ignore[arg-type]
    assert {int(v) for p in model.parameters() for v in p[:, 0]} == {resumed.step}
    session.close()


def test_a_loop_that_says_itself_when_a_step_is_over(tmp_path: Path) -> None:
    """Between two calls of step() arrays may be half changed: the flush waits for the next call."""

    def body(tell: Tell) -> None:
        state = {"w": torch.zeros(64, 8).numpy()}
        session = scarctl.attach(
            state, store=tmp_path / "store", interval=100, partitioning=scarctl.Partitioning(rows={"*": 1})
        )
        for step in itertools.count(1):
            state["w"][:32] += 1
            if step == 4:
                tell("ready")
            time.sleep(0.0 if step < 4 else 0.3)
            state["w"][32:] += 1
            session.step()

    end_by_signal(body)
    state = {"w": torch.ones(64, 8).numpy()}
    session = scarctl.attach(
        state, store=tmp_path / "store", partitioning=scarctl.Partitioning(rows={"*": 1})
    )
    resumed = session.resume()
    assert resumed.consistent
    assert resumed.step >= 4
    assert set(state["w"].flat) == {resumed.step}
    session.close()


# -- what comes after the flush ----------------------------------------------------------------------------------


def test_sigint_is_a_keyboard_interrupt_after_a_flush(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]
) -> None:
    def body(tell: Tell) -> None:
        loop = trained(tmp_path / "store")
        with pytest.raises(KeyboardInterrupt), loop.session:  # noqa: PT012
            try:
                tell("ready")
                time.sleep(600)
            finally:
                tell(f"flushed {loop.session._saving.flushed}")

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGINT)
        child.expect(f"flushed {STEPS}")
        assert child.wait() == 0
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    together = 1.0  # a busy machine may deliver the two further apart than usual

    def body(tell: Tell) -> None:
        signals.TOGETHER = together
        loop = trained(tmp_path / "store")

        def never(moment: object) -> bool:
            tell("flushing")
            time.sleep(600)
            return False

        loop.session._saving.seal = never  # type: ignore[method-assign, assignment]
        tell("ready")
        is_stuck()

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        child.expect("flushing")
        child.signal(signal.SIGTERM)  # together with the first: counts once
        time.sleep(2 * together)
        os.kill(child.pid, 0)
        assert child.status is None
        child.signal(signal.SIGTERM)
        assert child.wait(30.0) == -signal.SIGTERM
    loop = Loop(tmp_path / "store", seed=99)
    assert loop.session.resume().step <= STEPS
    loop.session.close()


def test_a_handler_of_the_users_own_runs_after_the_flush(tmp_path: Path, both_savers: str) -> None:
    def body(tell: Tell) -> None:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, frame: stop.append(signum))
        loop = trained(tmp_path / "store")
        tell("ready")
        while not stop:
            time.sleep(0.01)
        tell(f"handled after {loop.session._saving.flushed}")
        loop.train(2)  # it continues for as long as it likes
        loop.session.close()
        assert signal.getsignal(signal.SIGTERM).__name__ == "<lambda>"  # type: ignore[union-attr]

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        child.expect(f"handled after {STEPS}")
        assert child.wait() == 0
    loop = Loop(tmp_path / "store", seed=99)
    assert loop.session.resume().step == STEPS + 2
    loop.session.close()


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop = trained(tmp_path / "store")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        assert loop.session._saving.flushed is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        loop.session.close()

    with Forked(body) as child:
        assert child.wait() == 0


# -- an exception, a call, or the end of the program --------------------------------------------------------------


def test_an_exception_in_the_loop(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]
) -> None:
    loop = trained(tmp_path / "store")
    with pytest.raises(RuntimeError, match="broken batch"), loop.session:
        raise RuntimeError("broken batch")
    # The daemon has the remaining work, and the arena stays; without a daemon the session has waited for the
    # store.
    assert_goes_on_exactly(tmp_path / "store", expected, "memory" if both_savers == "daemon" else "store")


def test_a_program_that_just_ends(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    ends = {"raise RuntimeError('broken batch')": 1, "sys.exit(3)": 3, "": 0}
    running = []
    for number, end in enumerate(ends):
        program = f"""
            import sys, torch
            from pathlib import Path
            from tests.session.flushed import trained
            torch.set_num_threads(1)
            loop = trained(Path({str(tmp_path / str(number))!r}))
            {end}
        """
        running.append(Program(["-c", textwrap.dedent(program)]))
    assert [process.wait(60) for process in running] == list(ends.values())
    for number in range(len(ends)):
        assert_goes_on_exactly(tmp_path / str(number), expected, tier=None)


def test_by_hand(tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]) -> None:
    loop = Loop(tmp_path / "store")
    with pytest.raises(UsageError, match="before the first step"):
        loop.session.flush()
    loop.train(STEPS)
    half_an_iteration(loop)
    assert loop.session.flush()
    # In memory and queued: a process that dies here has lost nothing.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    from_thread: list[bool] = []
    thread = threading.Thread(target=lambda: from_thread.append(loop.session.flush()))
    thread.start()
    thread.join()
    assert from_thread == [True]
    loop.session.close(seal=False)
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_values_that_are_not_finite_are_not_flushed(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=100)
    loop.train(3)
    with torch.no_grad():
        loop.model.out.weight[:] = float("nan")
    assert not loop.session.flush()
    loop.session.recover("out.weight")
    assert torch.isfinite(loop.model.out.weight).all()
    assert loop.session.flush()
    loop.session.close()
