"""Test departures at the worst moment: within a step, twice at once, with worker processes, one within another."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from scarctl.errors import UsageError
from tests.session.test_evacuate import leave_host, throttle
from tests.support import stepper
from tests.support.forkserver import Program
from tests.support.process import Forked, Tell
from tests.support.stored import stored_steps
from tests.support.training import Loop

pytestmark = [pytest.mark.usefixtures("warm_torch"), pytest.mark.leaves_arena]


def test_a_signal_while_another_departure_runs(tmp_path: Path, arena_dir: Path) -> None:
    """A notice two minutes before the end, and then the usual SIGTERM: the process ends within its grace period."""
    store = tmp_path / "store"

    def body(tell: Tell) -> None:
        model, optimizer = stepper.build()
        session = stepper.attach(model, optimizer, str(store), grace="3s", daemon=False)
        session.resume()
        optimizer.step()
        session.checkpoint(full=True, wait=True)
        throttle(session, 2e5)
        optimizer.step()
        threading.Thread(target=session.evacuate, args=(120.0,), daemon=True).start()
        while not session._started().pace.leaving:
            time.sleep(0.01)
        tell("leaving")
        time.sleep(600)

    with Forked(body) as child:
        child.expect("leaving")
        began = time.monotonic()
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        assert time.monotonic() - began < 90, "the notice leaves 120 s"
    steps = stored_steps(store)
    assert set(steps) <= {1, 2}
    leave_host(arena_dir)
    step, exact = stepper.resumed(store)
    assert step in (1, 2)
    assert exact == (len(set(steps)) == 1)


class Numbers(torch.utils.data.Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number

    def __len__(self) -> int:
        return 1 << 20


def loads(store: Path, tell: Tell) -> None:
    """Train on what two worker processes load, in a process group of its own."""
    os.setpgid(0, 0)
    model, optimizer = stepper.build()
    with stepper.attach(model, optimizer, str(store), grace="100s") as session:
        session.resume()
        loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork", prefetch_factor=1)
        for number, _ in enumerate(loader):
            if number < 6:
                optimizer.step()
            if number == 8:  # the last step's checkpoint has ended: torch raises wherever the main thread is
                tell("ready")
            time.sleep(0.0 if number < 6 else 0.05)


def test_all_processes_of_a_loop_get_the_signal(tmp_path: Path, arena_dir: Path) -> None:
    """Its workers die at once, and torch raises in the loop, which leaves its `with` statement."""
    store = tmp_path / "store"
    with Forked(lambda tell: loads(store, tell)) as child:
        child.expect("ready")
        os.killpg(child.pid, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    leave_host(arena_dir)
    assert set(stored_steps(store)) == {6}
    assert stepper.resumed(store) == (6, True)


FAILS = """
import os, sys
from tests.session.test_evacuate import throttle
from tests.support import stepper
model, optimizer = stepper.build()
session = stepper.attach(model, optimizer, sys.argv[1], grace="100s", daemon=False)
session.resume()
optimizer.step()
session.checkpoint(full=True, wait=True)
throttle(session, 2e6)
optimizer.step()
os.kill(os.getpid(), 15)
raise RuntimeError("the loop fails because of the signal")
"""


def test_a_program_that_fails_because_of_the_signal(tmp_path: Path, arena_dir: Path) -> None:
    """Nothing closes its session, and its interpreter ends: not before the store has the newest step."""
    store, errors = tmp_path / "store", tmp_path / "errors"
    with errors.open("wb") as file:
        program = Program(["-c", FAILS, str(store)], stdout=file, stderr=file)
        assert program.wait(100) == -signal.SIGTERM, errors.read_text()
    assert "the loop fails because of the signal" in errors.read_text()
    leave_host(arena_dir)
    assert set(stored_steps(store)) == {2}
    assert stepper.resumed(store) == (2, True)


def test_a_notice_of_more_than_a_day_is_refused(tmp_path: Path) -> None:
    """Training makes no checkpoints until the deadline."""
    loop = Loop(tmp_path / "store")
    loop.train(1)
    with pytest.raises(UsageError, match="more than a day"):
        loop.session.evacuate(1e9)
    assert loop.session.evacuate(86400.0).safe
    loop.session.close()
