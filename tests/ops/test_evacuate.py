"""An evacuation whose processes die, or are released by the daemon, between its questions."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.daemon.client import ask_status
from scarctl.ops import evacuate
from tests.support import stepper
from tests.support.process import Forked, Tell

pytestmark = [
    pytest.mark.leaves_arena,
    pytest.mark.usefixtures("warm_torch", "daemon_folder"),
]


def trains(store: Path, tell: Tell) -> None:
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(store))
    for _ in range(7):
        optimizer.step()
    tell("ready")
    while True:
        time.sleep(600)
    del session


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Forked]:
    with Forked(lambda tell: trains(tmp_path / "store", tell)) as child:
        child.expect("ready")
        yield child


def kill(child: Forked) -> None:
    child.signal(signal.SIGKILL)
    child.wait()


def wait_until(folder: Path, reached: Callable[[list[str]], bool]) -> None:
    """Wait for the phases of the runs that the daemon has."""
    deadline = time.monotonic() + 40
    while True:
        answer = ask_status(folder, patience=30.0)
        found = [] if answer is None else [run["phase"] for run in answer["runs"]]
        if reached(found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def after(name: str, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something happen right after the evacuation's step of that name."""
    step = getattr(evacuate, name)

    def both(*args: Any) -> Any:
        found = step(*args)
        then()
        return found

    monkeypatch.setattr(evacuate, name, both)


def test_a_process_dies_before_it_is_asked_to_flush(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look finds it alive. Its memory is as safe as that of a process that died before."""

    def dies() -> None:
        kill(child)
        wait_until(daemon_folder, lambda phases: "attached" not in phases)

    after("_runs", dies, monkeypatch)
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert host.safe, host


def test_a_run_is_released_before_it_is_evacuated(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon has saved all of it meanwhile, and does not know it any more."""

    def dies() -> None:
        kill(child)
        wait_until(daemon_folder, lambda phases: not phases)

    after("_flush", dies, monkeypatch)
    began = time.monotonic()
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert host.safe, host
    assert time.monotonic() < began + 50, "it does not wait for a run that has ended"


def test_a_process_that_lives_is_waited_for(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its daemon is killed between the questions, and the session starts another one."""

    def daemon_dies() -> None:
        answer = ask_status(daemon_folder, patience=30.0)
        assert answer is not None
        os.kill(answer["pid"], signal.SIGKILL)

    after("_flush", daemon_dies, monkeypatch)
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert [process.safe for store in host.stores for process in store.processes] == [True], host


def test_a_daemon_that_is_late_is_asked_again(
    child: Forked, daemon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped for longer than one answer is waited for, as on a host without time for it."""

    def is_late() -> None:
        monkeypatch.setattr(evacuate, "_PATIENCE", 0.3)
        answer = ask_status(daemon_folder, patience=30.0)
        assert answer is not None
        os.kill(answer["pid"], signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (answer["pid"], signal.SIGCONT)).start()

    after("_runs", is_late, monkeypatch)
    host = evacuate.evacuate_host(60.0, arena_dir=str(daemon_folder.parent))
    assert host.safe, host
