"""Test that hyperparameters set in each iteration do not make a resume doubtful, but those set once do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from scarctl.session.changes import Changes


class Blend(nn.Module):
    """A layer with a hyperparameter."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = beta
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.beta * self.inner(x))


def freeze(module: nn.Module, frozen: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)


class Gan:
    """A generator and a discriminator. late: D is frozen after the first forward, as in CycleGAN."""

    def __init__(self, *, late: bool, d_first: bool) -> None:
        self.late, self.d_first = late, d_first
        self.model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
        self.optimizers = [
            torch.optim.SGD(self.model[name].parameters(), lr=0.01) for name in ("dg" if d_first else "gd")
        ]

    def step(self, _: int, *, half: bool) -> None:
        g, d = self.model["g"], self.model["d"]
        if self.d_first:
            freeze(d, False)
            self.train(0, d(torch.rand(2, 4)).sum(), half)
        fake = g(torch.rand(2, 4)) if self.late else None
        freeze(d, True)
        fake = g(torch.rand(2, 4)) if fake is None else fake
        if self.d_first and half:
            return
        self.train(int(self.d_first), d(fake).sum(), half)
        if not self.d_first and not half:
            freeze(d, False)
            self.train(1, d(torch.rand(2, 4)).sum(), half)

    def train(self, number: int, loss: torch.Tensor, half: bool) -> None:
        self.optimizers[number].zero_grad()
        loss.backward()
        if not half:
            self.optimizers[number].step()


class Annealed:
    """A model with a hyperparameter that `value` gives for each step."""

    def __init__(self, value: Callable[[int], float | None]) -> None:
        self.value = value
        self.model = Blend()
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.01)]

    def step(self, step: int, *, half: bool) -> None:
        value = self.value(step)
        if value is not None:
            self.model.beta = value
        self.optimizers[0].zero_grad()
        self.model(torch.rand(2, 4)).sum().backward()
        if not half:
            self.optimizers[0].step()


def run(store: Path, made: Any, until: int, *, followed: bool) -> tuple[str, ...]:
    """Train until a step, and close: within the next iteration if followed. Return the reasons for doubt."""
    torch.manual_seed(until)
    settings = grouped(daemon=False)
    session = scarctl.attach(made.model, made.optimizers, store=store, interval=1, **settings)
    session.resume()
    while session.head_step < until:
        made.step(session.head_step, half=False)
    if followed:
        made.step(session.head_step, half=True)
        assert session.flush()
    session.close(seal=not followed)
    assert session.resumed is not None
    return session.resumed.reasons


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("d_first", [False, True])
def test_what_is_frozen_for_a_part_of_each_iteration_is_no_doubt(
    tmp_path: Path, followed: bool, late: bool, d_first: bool
) -> None:
    for until in (6, 7, 12):  # the second run ends before it can find the values that it sets and restores
        assert not run(tmp_path / "s", Gan(late=late, d_first=d_first), until, followed=followed)


@pytest.mark.parametrize("followed", [False, True])
def test_a_function_of_the_step_is_no_doubt(tmp_path: Path, followed: bool) -> None:
    for until in (6, 7, 8):
        made = Annealed(lambda step: min(1.0, step / 10))
        assert not run(tmp_path / "s", made, until, followed=followed)


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("once", [0, 3])
def test_what_is_set_once_and_not_again_is_doubted(tmp_path: Path, followed: bool, once: int) -> None:
    made = Annealed(lambda step: 0.5 if step == once else None)
    run(tmp_path / "s", made, 6, followed=followed)
    reasons = run(tmp_path / "s", Annealed(lambda _: None), 7, followed=followed)
    assert any("Blend.beta" in reason for reason in reasons)


def test_another_function_of_the_step_is_doubted_where_the_next_iteration_had_begun(tmp_path: Path) -> None:
    run(tmp_path / "s", Annealed(lambda step: step / 10), 6, followed=True)
    reasons = run(tmp_path / "s", Annealed(lambda step: step / 20), 7, followed=True)
    assert any("Blend.beta" in reason for reason in reasons)


def test_a_layer_that_stays_frozen_is_doubted(tmp_path: Path) -> None:
    made = Annealed(lambda step: freeze(made.model.inner, True) if step == 2 else None)
    run(tmp_path / "s", made, 6, followed=True)
    reasons = run(tmp_path / "s", Annealed(lambda _: None), 7, followed=True)
    assert any("requires_grad" in reason for reason in reasons)


@pytest.mark.parametrize(
    "hostile", [None, 5, "0 Blend.beta", {"0 Blend.beta": 1}, [["x"], {}, None, 7], ["0 Blend.beta"] * 9]
)
def test_hostile_names_are_no_error_and_hide_only_what_they_may(hostile: Any) -> None:
    model = Blend()
    changes = Changes(model.modules)
    saved = {"changed": {"0 Blend.beta": "0.5"}, "toggled": hostile, "moving": hostile}
    changes.expect(saved)
    assert changes.differences(saved, None, followed=True)
    hidden = isinstance(hostile, list) and "0 Blend.beta" in hostile
    assert bool(changes.differences(saved, None, followed=False)) is not hidden
    assert not changes.differences(
        {"changed": hostile if not isinstance(hostile, dict) else 1}, None, followed=True
    )
