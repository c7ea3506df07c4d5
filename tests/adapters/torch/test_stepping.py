"""Test nested steps of an optimizer, and steps that raise: hooks count only the outermost step."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
import scarctl_adapters
from scarctl_adapters.torch.stepping import around


class Inner(torch.optim.SGD):
    """A class whose subclass calls its `step`, so that torch wraps both."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(closure)


class Outer(Inner):
    swallows = False

    def step(self, closure: Any = None) -> Any:
        try:
            return super().step(closure)
        except RuntimeError:
            if not self.swallows:
                raise
        return None


def counted() -> tuple[Outer, list[str]]:
    model = nn.Linear(2, 2)
    optimizer = Outer(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    seen: list[str] = []
    around(optimizer, lambda: seen.append("before"), lambda: seen.append("after"), lambda: None)
    return optimizer, seen


def test_nested_steps_count_once() -> None:
    optimizer, seen = counted()
    for _ in range(3):
        optimizer.step()
    assert seen == ["before", "after"] * 3


def test_a_step_counts_after_one_that_raised() -> None:
    optimizer, seen = counted()
    for _ in range(2):
        optimizer.fails = True
        with pytest.raises(RuntimeError):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
    assert seen == ["before", "before", "after"] * 2


def test_a_step_counts_if_one_inside_it_raised() -> None:
    optimizer, seen = counted()
    optimizer.swallows = optimizer.fails = True
    optimizer.step()
    optimizer.step()
    assert seen == ["before", "after"] * 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hooks_are_not_compiled_by_themselves(tmp_path: Path) -> None:
    """A step that is compiled calls backward outside of its graph: the hooks run while frames are compiled."""
    traced: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("torch._dynamo")
    handler.emit = lambda record: traced.append(record.getMessage())  # type: ignore[method-assign]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    torch._logging.set_logs(dynamo=logging.INFO)
    logger.addHandler(handler)
    try:
        with scarctl.attach(
            model, optimizer, store=tmp_path / "s", settings=scarctl.Settings(daemon=False)
        ) as session:
            compiled = torch.compile(iterate, backend="eager")
            for _ in range(6):
                compiled(torch.rand(2, 4))
            assert session.head_step == 6
    finally:
        logger.removeHandler(handler)
        torch._logging.set_logs()
    begun = [text for text in traced if "start tracing" in text]
    assert any("iterate" in text and __file__ in text for text in begun), "a line names the file"
    product = [str(Path(package.__file__).parent) + os.sep for package in (scarctl, scarctl_adapters)]
    assert not [text for text in begun if any(folder in text for folder in product)]
