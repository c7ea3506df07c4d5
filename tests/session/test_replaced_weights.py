"""Test weights that a loop replaces between two steps: saved unchanged, but never as the step's."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import scarctl
from scarctl import Selection, Settings
from tests.support.process import Forked, Tell

QUIET = Settings(daemon=False)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()


Way = Literal["counted", "uncounted", "swapped"]
"""A write in place that torch counts, a write through `.data`, or other memory."""


def put(model: torch.nn.Module, values: list[torch.Tensor], way: Way) -> list[torch.Tensor]:
    """Replace the parameters' values, and return the former ones."""
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            if way == "swapped":
                parameter.data = value.clone()
            else:
                (parameter if way == "counted" else parameter.data).copy_(value)
    return before


@pytest.mark.parametrize("way", ["counted", "uncounted", "swapped"])
@pytest.mark.parametrize("restored", [True, False])
def test_a_flush_in_an_evaluation_of_other_weights_is_not_exact(
    tmp_path: Path, arena_dir: Path, caplog: pytest.LogCaptureFixture, way: Way, restored: bool
) -> None:
    model, optimizer = build()
    session = scarctl.attach(model, optimizer, store=tmp_path / "run", settings=QUIET)
    session.resume()
    average = [p.detach().clone() for p in model.parameters()]
    for _ in range(5):
        step(model, optimizer)
    model.eval()
    trained = put(model, average, way)
    model(torch.randn(4, 6))
    if restored:
        put(model, trained, way)
        model.train()
    with caplog.at_level(logging.WARNING, "scarctl"):
        assert session.flush()
    assert ("in place of its parameters" in caplog.text) is not restored
    session._opening.close(failed=True)  # as a signal ends it
    again, other = build()
    with scarctl.attach(again, other, store=tmp_path / "run", settings=QUIET) as later:
        resumed = later.resume()
        assert (resumed.step, resumed.exact) == (5, restored)
        assert any("in place of its parameters" in reason for reason in resumed.reasons) is not restored
        expected = trained if restored else average
        assert all(map(torch.equal, again.parameters(), expected))
        # A later state is its own.
        put(again, trained, way)
        step(again, other)
        assert not [c for c in later.caveats if c.kind == "weights-replaced"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_copy_made_while_other_values_are_in_place_is_repeated(
    tmp_path: Path, arena_dir: Path, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """Weights are clipped through `.data` after each step, as in WGAN, or swapped out during an evaluation."""
    model, optimizer = build()
    session = scarctl.attach(
        model,
        optimizer,
        store=tmp_path / "run",
        interval=2,
        selection=Selection(policy="full"),
        settings=QUIET,
    )
    session.resume()
    distances: list[float] = []

    def look(*_: Any) -> None:
        """Check right before a step, after scarctl."""
        engine = session._opening.engine
        if engine is not None:
            live = session._saving._binding.live(engine.arena)
            distances.append(float(live.distances().max()))

    optimizer.register_step_pre_hook(look)
    for _ in range(3):
        step(model, optimizer)
    with caplog.at_level(logging.WARNING, "scarctl"):
        for _ in range(3):
            assert session._opening.engine is not None
            assert session._opening.engine.saver.drain(60)
            step(model, optimizer)  # a checkpoint begins
            ready = session._saving._checkpoints.ready
            if kept:
                assert ready(60)
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.05, 0.05)
            else:
                trained = put(model, [torch.zeros_like(p) for p in model.parameters()], "uncounted")
                assert ready(60)
                put(model, trained, "uncounted")
            distances.clear()
            step(model, optimizer)  # before it, the checkpoint ends
            assert distances == [0.0]
    if kept:
        assert caplog.text.count("which torch does not count") == 1
    session.close()


def averaged(store: Path) -> Callable[[Tell], None]:
    """Return a run that gets SIGTERM in an evaluation of the average, which takes longer than a flush waits."""

    def train(tell: Tell) -> None:
        model, optimizer = build()
        session = scarctl.attach(model, optimizer, store=store)
        session.resume()
        average = [p.detach().clone() for p in model.parameters()]
        for _ in session.epochs(1):
            for _ in session.batches(range(5)):
                step(model, optimizer)
            put(model, average, "uncounted")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    return train


def test_a_signal_in_an_evaluation_after_the_epoch(tmp_path: Path, arena_dir: Path) -> None:
    with Forked(averaged(tmp_path / "run")) as child:
        assert child.wait(120) == -signal.SIGTERM
    model, optimizer = build()
    with scarctl.attach(model, optimizer, store=tmp_path / "run") as session:
        resumed = session.resume()
        assert (resumed.step, resumed.exact) == (5, False)
        assert any("in place of its parameters" in reason for reason in resumed.reasons)
