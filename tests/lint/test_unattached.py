"""Test that training by optimizers that were not attached is reported, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import scarctl


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(4, 4)


def test_a_model_that_only_another_optimizer_trains_is_reported(tmp_path: Path, model: nn.Module) -> None:
    attached, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    settings = scarctl.Settings(daemon=False)
    with scarctl.attach(model, attached, store=tmp_path / "store", settings=settings) as session:
        for _ in range(3):
            step(model, other)
        assert [caveat.kind for caveat in session.caveats] == ["no-step"]
        step(model, attached)
        assert not list(session.caveats)


def test_another_models_optimizer_is_none_of_its_business(tmp_path: Path, model: nn.Module) -> None:
    attached, another = torch.optim.SGD(model.parameters(), lr=0.1), nn.Linear(4, 4)
    other = torch.optim.SGD(another.parameters(), lr=0.1)
    settings = scarctl.Settings(daemon=False)
    with scarctl.attach(model, attached, store=tmp_path / "store", settings=settings) as session:
        for _ in range(5):
            step(another, other)
        assert not list(session.caveats)


def test_it_costs_nothing_after_the_first_iteration(tmp_path: Path, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(torch_optimizer._global_optimizer_post_hooks)
    settings = scarctl.Settings(daemon=False)
    with scarctl.attach(model, optimizer, store=tmp_path / "store", settings=settings):
        assert len(torch_optimizer._global_optimizer_post_hooks) == before + 1
        step(model, optimizer)
        assert len(torch_optimizer._global_optimizer_post_hooks) == before
