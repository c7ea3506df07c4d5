"""Run a training loop whose every value is the number of its step, so that a copy of mixed steps shows.

    python -m tests.support.stepper STORE STEPS

It resumes, checks what it got, trains, and prints after every step a JSON line with the step and, per partition, the
step that is acknowledged as durable.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from scarctl.state.version import step_of


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


def tell(step: int, durable: list[int]) -> None:
    """Write one whole line at once: the process may be killed right after."""
    os.write(1, json.dumps({"step": step, "durable": durable}).encode() + b"\n")


def main() -> None:
    torch.set_num_threads(1)
    model, optimizer = build()
    session = attach(model, optimizer, sys.argv[1])
    start = session.resume().step
    if start:
        assert torn_rows(model, optimizer) == []
        # Continue from whole numbers: from here on every value is its step again.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(start)
                optimizer.state[parameter]["count"].fill_(start)
    tell(start, [])
    for step in range(start + 1, int(sys.argv[2]) + 1):
        optimizer.step()
        assert session._engine is not None
        tell(step, step_of(session._engine.arena.durable).tolist())
    session.close()


if __name__ == "__main__":
    main()
