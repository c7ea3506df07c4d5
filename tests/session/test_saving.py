"""Test that a checkpoint in memory is complete as soon as its copy is, before the next step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import scarctl
from scarctl.arena.extras import read_extras
from scarctl.checkpoint import engine as engine_module
from scarctl.state.version import step_of
from tests.support import forkserver
from tests.support.training import Net, differing, state_of

DATA = torch.arange(64).reshape(8, 8)


def train(store: Path, steps: int, at: Any = None) -> tuple[scarctl.Session, Net, Any]:
    """Train a declared loop up to `steps`. at: called with the session before every optimizer's step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = scarctl.attach(model, optimizer, store=store, interval=1)
    session.resume()
    for _ in session.epochs(10):
        for ids in session.batches(DATA):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            if at is not None:
                at(session)
            optimizer.step()
            if session.head_step == steps:
                return session, model, optimizer
    raise AssertionError("it has enough data")


def complete(session: scarctl.Session, *, seconds: float = 10.0) -> bool:
    """Wait until memory has the newest step with its extras; return whether it has."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        engine = session._engine
        found = engine and read_extras(engine.arena)
        if found and found.tree and found.whole and step_of(found.version) == session.head_step:
            return True
        time.sleep(0.002)
    return False


def die(session: scarctl.Session) -> None:
    """Kill this process within the sixth iteration."""
    if session.head_step == 5 and complete(session):
        os.kill(os.getpid(), signal.SIGKILL)


def test_memory_is_complete_before_the_next_step(tmp_path: Path) -> None:
    found: list[bool] = []

    def look(session: scarctl.Session) -> None:
        if session.head_step > 1:
            found.append(complete(session))

    session, *_ = train(tmp_path / "store", 6, look)
    assert found == [True] * 4
    assert session.stats.checkpoints >= 5
    session.close()


def test_kill_9_in_the_next_iteration_loses_that_iteration_alone(tmp_path: Path) -> None:
    code = f"from tests.session.test_saving import *; train(Path({str(tmp_path)!r}) / 'store', 9, die)"
    assert forkserver.run(["-c", code], timeout=120).returncode == -signal.SIGKILL
    session, model, optimizer = train(tmp_path / "store", 9)
    assert session.resumed is not None
    assert (session.resumed.step, session.resumed.consistent, session.resumed.label.declared) == (
        5,
        True,
        True,
    )
    undisturbed, *other = train(tmp_path / "other", 9)
    assert differing(state_of(model, optimizer), state_of(*other)) == []
    session.close()
    undisturbed.close()


def test_an_error_reaches_the_loop_that_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    settings = scarctl.Settings(on_error="raise")
    session = scarctl.attach(model, optimizer, store=tmp_path / "store", interval=1, settings=settings)

    def full(*_: Any) -> int:
        raise OSError("no space left")

    def loop() -> None:
        for _ in session.epochs(1):
            for ids in session.batches(DATA):
                model(ids).square().mean().backward()
                optimizer.step()
                assert session._engine is not None
                monkeypatch.setattr(engine_module, "write_extras", full)

    with pytest.raises(OSError, match="no space left"):
        loop()
    monkeypatch.undo()
    session.close()
