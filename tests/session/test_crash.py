"""Test a training process killed by SIGKILL at any time: the rest is intact, acknowledged copies are there."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scarctl.arena.folder import arena_folder
from scarctl.daemon.client import ask
from scarctl.daemon.protocol import SOCKET
from scarctl.errors import Unavailable
from scarctl.state.version import step_of
from scarctl.store import Store, verify
from tests.support import stepper
from tests.support.forkserver import Program
from tests.support.stored import stored_steps

pytestmark = pytest.mark.usefixtures("both_savers")


def train_and_kill(
    store: Path,
    seconds: float,
    log: Path,
    ready: Callable[[list[dict[str, Any]]], bool] = lambda lines: len(lines) > 1,
) -> tuple[int, np.ndarray]:
    """Run the stepper, and kill it `seconds` after it is `ready`. Return its last step, and the acknowledged steps."""
    with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        command = ["-m", "tests.support.stepper", str(store), "1000000"]
        process = Program(command, stdout=output, stderr=errors)
    try:
        deadline = time.monotonic() + 120
        while not ready(told(log)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL, log.with_suffix(".err").read_text()
    lines = told(log)
    return lines[-1]["step"], np.array(lines[-1]["durable"])


def kill_daemon(base: Path) -> None:
    """Send SIGKILL to the host's daemon, if there is one."""
    folder = arena_folder(str(base), "x").parent
    try:
        pid = ask(folder, "status")["pid"]
    except Unavailable:
        return
    os.kill(pid, signal.SIGKILL)
    (folder / SOCKET).unlink(missing_ok=True)


def told(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]


@pytest.mark.leaves_arena
@pytest.mark.parametrize("host_is_lost", [False, True], ids=["memory-left", "store-only"])
def test_kill_and_run_again(tmp_path: Path, arena_dir: Path, host_is_lost: bool) -> None:
    folder, rng = tmp_path / "store", random.Random(7)
    aged: set[int] = set()
    """Steps given by `Engine.age_after` to copies that were ahead of the step from which a run continued."""
    for _ in range(2):
        step, durable = train_and_kill(folder, rng.uniform(0.0, 0.6), tmp_path / "log")
        aged.add(max(0, told(tmp_path / "log")[0]["step"] - 1))
        store = Store.open(str(folder))
        assert verify(store, read_data=True).problems == []
        if host_is_lost:
            kill_daemon(arena_dir)
            shutil.rmtree(arena_folder(str(arena_dir), store.run_id), ignore_errors=True)
        store.close()
        if durable.size and durable.min() >= 0:
            assert (stored_steps(folder) >= durable).all()

        model, optimizer = stepper.build()
        session = stepper.attach(model, optimizer, str(folder))
        resumed = session.resume()
        assert resumed.step <= step + 1
        if resumed.report is not None:
            assert set(resumed.report.tiers) <= ({"store"} if host_is_lost else {"memory", "store"})
            assert stepper.torn_rows(model, optimizer) == []
            # Every row is of the step in the report, or was relabelled when an earlier run continued.
            steps = torch.cat([p[:, 0] for p in model.parameters()]).detach().numpy()
            said = step_of(resumed.report.plan.version)
            assert (said <= steps).all()
            assert set(said[said != steps].tolist()) <= aged
        aged.add(max(0, resumed.step - 1))
        session.close(seal=False)
        # Release it as a dying process does: the next one finds what this one found.


def test_resume_takes_from_memory_what_the_store_never_got(tmp_path: Path, arena_dir: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            model, optimizer = stepper.build()
            session = stepper.attach(model, optimizer, str(tmp_path / "store"))
            optimizer.step()
            session._saving.finish()
            assert session._engine is not None
            session._engine.saver.drain(30)
            session._engine.saver.stop()  # from here on nothing reaches the store
            for _ in range(11):
                optimizer.step()
            session._saving.finish()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert stored_steps(tmp_path / "store").max() == 1
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    resumed = session.resume()
    assert (resumed.step, resumed.consistent) == (12, True)
    assert resumed.report is not None
    assert resumed.report.tiers == {"memory": 64}
    assert stepper.torn_rows(model, optimizer) == []
    assert {int(v) for p in model.parameters() for v in p[:, 0]} == {12}
    assert session._engine is not None
    assert session._engine.saver.drain(30), "what was only in memory becomes durable now"
    assert set(stored_steps(tmp_path / "store")) == {12}
    session.close()


@pytest.mark.leaves_arena
@pytest.mark.parametrize("forget", ["extras", "arena", "nothing"])
def test_death_before_the_first_whole_checkpoint(tmp_path: Path, arena_dir: Path, forget: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            model, optimizer = stepper.build()
            session = stepper.attach(model, optimizer, str(tmp_path / "store"))
            session._saver.notify = lambda: None  # type: ignore[method-assign]
            optimizer.step()
            session._saving.finish()
            kill_daemon(arena_dir)  # it would at once make durable what this process leaves
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    folder = arena_folder(str(arena_dir), Store.open(str(tmp_path / "store")).run_id)
    lost = {"extras": ("extras-*",), "arena": ("*",)}
    for pattern in lost.get(forget, ()):
        paths = list(folder.glob(pattern))
        assert paths
        for path in paths:
            path.unlink()
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    resumed = session.resume()
    assert resumed.step == (1 if forget == "nothing" else 0)
    assert resumed.consistent
    for _ in range(5):
        optimizer.step()
    session.close()
    assert session.stats.errors == 0
    assert set(stored_steps(tmp_path / "store")) == {resumed.step + 5}


def test_copies_that_were_never_complete_are_no_state(tmp_path: Path) -> None:
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    for _ in range(7):
        optimizer.step()
    assert session._engine is not None
    session._saving.finish()
    session._saver.drain(30)
    expected_version = session._engine.arena.version.max()
    session._engine.complete = lambda copied, *_: copied  # type: ignore[method-assign]
    for _ in range(3):
        optimizer.step()
    session._saving.finish()  # copied, but never current
    session._engine.saver.close()
    session._engine.arena.close()
    session.store.close()
    session._unwatch()
    session._closed = True

    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    resumed = session.resume()
    assert (resumed.step, resumed.consistent) == (step_of(int(expected_version)), True)
    assert session._engine is not None
    for _ in range(4):
        optimizer.step()
    session.close()
    assert session.stats.errors == 0
    assert set(stored_steps(tmp_path / "store")) == {resumed.step + 4}
