"""Test that a run which ends without a copy of its newest step says so, even if the reason was logged long before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from tests.support.process import Tell, end_by_signal

pytestmark = pytest.mark.usefixtures("one_thread")

SAVED, STEPS = 5, 8


def tied(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


def converted(model: nn.Sequential) -> None:
    model.to(torch.float64)


def rebuilt(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(6, 4))
    model[2].bias = nn.Parameter(torch.zeros(6))


def train(store: Path, change: Callable[[nn.Sequential], None]) -> scarctl.Session:
    """Train 8 steps, and change the model after 5, so that it no longer fits the store."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(model, optimizer, store=store, interval=1, fraction=1.0)
    session.resume()
    for step in range(STEPS):
        if step == SAVED:
            session.checkpoint(full=True, wait=True)
            change(model)
        optimizer.zero_grad()
        model(torch.ones(2, 4).to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
    return session


def resumed(store: Path) -> scarctl.Resumed:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with scarctl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store) as session:
        return session.resume()


def says(text: str) -> None:
    lost = f"step {STEPS} is not saved as a whole: group "
    assert text.count(lost) == 1
    assert text.count("checkpoint at step") == 1, "the reason itself was logged once, when it first arose"
    assert text.index("checkpoint at step") < text.index(lost)
    assert f"The newest copies are of step {SAVED}" in text


def test_a_signal_without_a_copy_is_said(tmp_path: Path, both_savers: str) -> None:
    def body(tell: Tell) -> None:
        logging.getLogger("scarctl").addHandler(logging.FileHandler(tmp_path / "log"))
        session = train(tmp_path / "store", rebuilt)
        tell("ready")
        time.sleep(600)
        del session

    end_by_signal(body)
    says((tmp_path / "log").read_text())
    assert resumed(tmp_path / "store").step == SAVED


@pytest.mark.parametrize("change", [tied, converted, rebuilt])
def test_the_end_of_the_loop_without_a_copy_is_said(
    tmp_path: Path,
    both_savers: str,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[nn.Sequential], None],
) -> None:
    train(tmp_path / "store", change).close()
    says(caplog.text)
    assert resumed(tmp_path / "store").step == SAVED


@pytest.mark.parametrize("saved", [True, False])
def test_a_step_that_raises_leaves_the_one_before_unsaved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: bool
) -> None:
    """If the step before is saved, nothing is said."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(model, optimizer, store=tmp_path / "store", interval=100, fraction=1.0)
    session.resume()
    for step in range(3):
        if step == 2:
            optimizer.register_step_pre_hook(fail)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        if step == 2:
            with pytest.raises(RuntimeError, match="memory"):
                optimizer.step()
        else:
            optimizer.step()
            if saved:
                session.checkpoint(full=True, wait=True)
    session.close()
    unsaved = "step 2 is not saved as a whole: a later step did not end. The newest copies are of step 1"
    assert (unsaved in caplog.text) != saved
    assert resumed(tmp_path / "store").step == (2 if saved else 1)
