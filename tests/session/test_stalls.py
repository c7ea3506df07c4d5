"""Test that `Stats` counts the time that training waits for copies: once, and wherever the loop waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl

SLOW = 0.15


def slow(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a norm that makes every copy after the first take a while, in its thread."""
    time.sleep(SLOW)
    return torch.ones(live[""].shape[0])


def attached(folder: Path, hooks: str) -> tuple[scarctl.Session, torch.optim.Optimizer, nn.Parameter]:
    weight = nn.Parameter(torch.zeros(8, 4))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(
        model,
        optimizer,
        store=folder,
        hooks=hooks,
        interval=1,
        selection=scarctl.Selection(norm=slow),
        settings=scarctl.Settings(daemon=False),
    )
    session.resume()
    return session, optimizer, weight


def test_a_checkpoint_that_the_loop_asks_for_is_no_stall(tmp_path: Path) -> None:
    session, optimizer, weight = attached(tmp_path / "store", "auto")
    with session:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        before = session.stats.stall_seconds
        for _ in range(8):
            session.checkpoint()
        optimizer.step()
        assert session.stats.stall_seconds - before < 8 * SLOW


@pytest.mark.parametrize("batches", [False, True])
def test_a_loop_that_waits_at_once_has_its_waits_counted(batches: bool, tmp_path: Path) -> None:
    """Without hooks it waits in `step`. With one batch in an epoch it waits where the next epoch begins."""
    session, optimizer, weight = attached(tmp_path / "store", "auto" if batches else "off")
    with session:
        for _ in session.epochs(4):
            for _ in session.batches([0]) if batches else [0]:
                weight.grad = torch.ones_like(weight)
                optimizer.step()
                if not batches:
                    session.step()
        assert session.stats.stall_seconds >= 2 * SLOW
