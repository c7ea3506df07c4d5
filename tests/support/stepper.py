"""Provide a training whose every value is the number of its step, so that a copy of mixed steps shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from tests.support.process import Tell


class Stepper(torch.optim.Optimizer):
    """Adds one to every parameter and to a slot of its shape."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("count", torch.zeros_like(parameter)).add_(1)
                parameter.add_(1)


def build() -> tuple[nn.ParameterList, Stepper]:
    """Return two wide parameters and one narrow, 64 partitions in all, all values 0, and their optimizer."""
    model = nn.ParameterList([torch.zeros(24, 4096), torch.zeros(36, 2048), torch.zeros(4, 16)])
    return model, Stepper(model.parameters())


def attach(model: nn.Module, optimizer: Stepper, store: str, **options: Any) -> scarctl.Session:
    """Attach a session with a short interval and one partition per row."""
    settings: dict[str, Any] = {
        "fraction": 0.25,
        "interval": 3,
        "policy": "round",
        "shards": 4,
        "rows": {"*": 1},
    }
    return scarctl.attach(model, optimizer, store=store, **grouped(**settings, **options))


def torn_rows(model: nn.Module, optimizer: Stepper) -> list[str]:
    """Return the rows that hold values of more than one step, in the parameter or between it and its slot."""
    return [
        f"{name}[{row}]"
        for name, parameter in model.named_parameters()
        for row in range(parameter.shape[0])
        if (parameter[row] != parameter[row, 0]).any()
        or (optimizer.state[parameter]["count"][row] != parameter[row, 0]).any()
    ]


def resumed(store: Path | str, mode: Literal["partial", "auto"] = "partial") -> tuple[int, bool]:
    """Return the step at which another process resumes, and whether the state is consistent. No row may be torn."""
    model, optimizer = build()
    with attach(model, optimizer, str(store)) as session:
        found = session.resume(mode)
        assert torn_rows(model, optimizer) == []
    return found.step, found.consistent


def trains(store: Path | str, tell: Tell, steps: int = 7) -> None:
    """Take some steps, then wait as a loop does in a long evaluation."""
    model, optimizer = build()
    session = attach(model, optimizer, str(store))
    for _ in range(steps):
        optimizer.step()
    tell("ready")
    while True:
        time.sleep(600)
    del session
