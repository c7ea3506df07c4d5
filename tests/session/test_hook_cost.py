"""Test that steps make few calls, read no generator, and keep what a flush needs."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
from scarctl.util import generators
from scarctl_adapters.torch.adapter import TorchAdapter

MOST = 40
"""Most calls of the package's functions in such a step: 518 at first."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    return model, torch.optim.AdamW(model.parameters())


def test_a_step_in_which_nothing_is_due_makes_few_calls(tmp_path: Path) -> None:
    """Python functions of the package, in a loop that declares its steps' ends."""
    root, found, saved = str(Path(scarctl.__file__).parent), list[int](), build()
    adapters = str(Path(TorchAdapter.__module__.partition(".")[0]))
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and (name.startswith(root) or adapters in name)

    with scarctl.attach(*saved, store=tmp_path / "s", interval=1000) as session:
        for number in session.batches(range(30)):
            if number == 10:
                assert session._saver.drain(60.0)  # some steps later this is noticed
            if number > 14:
                found.append(count)
            count = 0
            sys.setprofile(profile)
            train(*saved)
        sys.setprofile(None)
        assert min(found) <= MOST
        assert session.stats.checkpoints >= 1


def test_random_numbers_of_each_step_are_kept_without_asking_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = build()
    asked: list[str] = []
    session = scarctl.attach(*saved, store=tmp_path / "s", interval=1000)
    session.resume()
    train(*saved)
    monkeypatch.setattr(generators, "_python", lambda: asked.append("python"))
    monkeypatch.setattr(generators, "_numpy", lambda: asked.append("numpy"))
    for _ in range(3):
        train(*saved)
        expected = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.random()
        np.random.rand()
        torch.rand(1)
    assert not asked
    assert session.flush()  # of the step's end, not of this moment
    session.close(seal=False)
    again = build()
    with scarctl.attach(*again, store=tmp_path / "s", interval=1000) as session:
        session.resume()
        assert random.getstate() == expected[0]
        assert np.array_equal(np.random.get_state()[1], expected[1][1])
        assert np.random.get_state()[2:] == expected[1][2:]
        assert torch.equal(torch.get_rng_state(), expected[2])
