"""Test loops that change the model after the step or the last batch: the saved state is of one moment, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import scarctl
from scarctl.config import grouped
from tests.loops.rig import by_step, train
from tests.support.training import differing

STEPS = 6
Act = Callable[[nn.Sequential, scarctl.Session], object]


class Run:
    """A short training of a model with batch norm."""

    def __init__(self, store: Path, **given: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = grouped(policy="full", interval=1, daemon=False)
        self.session = scarctl.attach(self.model, self.optimizer, store=store, **options)
        self.resumed = self.session.resume(**given)

    def train(self, ours: bool, until: int = STEPS) -> None:
        numbers = range(self.resumed.step, until)
        if ours:
            numbers = self.session.batches(range(until))  # type: ignore[assignment]
        for number in numbers:
            train(self.model, self.optimizer, by_step(number))

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def scaled(model: nn.Sequential) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def measured(model: nn.Sequential, session: scarctl.Session) -> None:
    update_bn([by_step(100 + number)[0] for number in range(3)], model)


def averaged(model: nn.Sequential, session: scarctl.Session) -> None:
    """Other weights, and their statistics, for which no call has stopped recording gradients."""
    scaled(model)
    model[1].reset_running_stats()
    for number in range(3):
        model(by_step(100 + number)[0])


def best(model: nn.Sequential, session: scarctl.Session) -> None:
    """Return the weights and statistics of another epoch."""
    model.load_state_dict(
        {name: value * 0.5 for name, value in model.state_dict().items() if value.dim()}
        | {"1.num_batches_tracked": torch.tensor(3)}
    )


@pytest.mark.parametrize(
    ("act", "ours"), [(measured, True), (averaged, True), (best, True), (averaged, False)]
)
def test_what_is_closed_is_the_live_model_and_not_called_exact(tmp_path: Path, act: Act, ours: bool) -> None:
    first = Run(tmp_path / "store")
    first.train(ours)
    act(first.model, first.session)
    closed = first.state()
    first.session.close()
    again = Run(tmp_path / "store")
    assert differing(again.state(), closed) == []
    assert (again.resumed.step, again.resumed.exact) == (STEPS, False), again.resumed
    again.session.close()


@pytest.mark.parametrize("ours", [True, False])
def test_statistics_that_are_loaded_between_two_steps_are_those_of_the_step(
    tmp_path: Path, ours: bool
) -> None:
    """As BYOL does with its target, or a loop that goes back to the weights it has kept: `copy_`, and no forward."""

    def loop(store: Path, stop: int = STEPS) -> Run:
        run = Run(store)
        numbers = run.session.batches(range(STEPS)) if ours else iter(range(run.resumed.step, STEPS))
        for number in numbers:
            if number == stop:
                run.model(by_step(number)[0])
                break
            train(run.model, run.optimizer, by_step(number))
            run.model[1].running_mean.mul_(0.5)  # type: ignore[operator, union-attr]
        return run

    whole = loop(tmp_path / "whole")
    first = loop(tmp_path / "store", stop=4)
    assert first.session.flush()
    first.session._opening.close(failed=True)  # as a signal ends it
    again = loop(tmp_path / "store")
    found = again.session.resumed
    assert found is not None
    assert (found.step, found.exact) == (4, True)
    assert differing(again.state(), whole.state()) == []
    whole.session.close()
    again.session.close()


def test_a_snapshot_of_an_average_is_not_the_state_of_the_run(tmp_path: Path) -> None:
    first = Run(tmp_path / "store")
    first.train(ours=False)
    trained = first.state()
    scaled(first.model)
    average = first.state()
    first.session.snapshot("best")
    first.model.load_state_dict(trained)
    first.session.close()
    again = Run(tmp_path / "store", snapshot="best")
    assert differing(again.state(), average) == []
    assert not again.resumed.exact
    assert "in place of its parameters" in "; ".join(again.resumed.reasons)
    again.session.close()


@pytest.mark.parametrize("change", ["weights", "rate"])
def test_what_is_changed_between_the_resume_and_the_loop_is_said(tmp_path: Path, change: str) -> None:
    first = Run(tmp_path / "store")
    first.train(ours=True, until=3)
    first.session.close()
    again = Run(tmp_path / "store")
    assert again.resumed.exact
    if change == "weights":
        scaled(again.model)
    else:
        again.optimizer.param_groups[0]["lr"] = 0.01
    again.train(ours=True)
    assert again.session.resumed is not None
    assert not again.session.resumed.exact
    assert "between resume() and the loop" in "; ".join(again.session.resumed.reasons)
    again.session.close()
