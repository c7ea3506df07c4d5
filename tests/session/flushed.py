"""Flush a run in the middle of an iteration, and check that it continues exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scarctl.store import Store, verify
from tests.support.training import Loop, differing

STEPS, MORE = 7, 5


def half_an_iteration(loop: Loop) -> torch.Tensor:
    """Do the next batch and its forward pass: random numbers, data position and buffers are no longer the step's."""
    ids = torch.randint(0, 64, (16,))
    loop.position["batches"] += 1
    loss = loop.model(ids).square().mean()
    loop.optimizer.zero_grad()
    return loss


def trained(store: Path, **options: Any) -> Loop:
    loop = Loop(store, **options)
    loop.train(STEPS)
    half_an_iteration(loop)
    return loop


def assert_goes_on_exactly(
    store: Path, expected: dict[str, torch.Tensor], tier: str | None = "memory"
) -> None:
    """Check that another process resumes at the newest step, and ends where the uninterrupted run ended."""
    loop = Loop(store, seed=99)
    resumed = loop.session.resume()
    assert (resumed.step, resumed.consistent) == (STEPS, True)
    assert resumed.report is not None
    assert tier is None or set(resumed.report.tiers) == {tier}
    assert loop.position == {"batches": STEPS}
    loop.train(MORE)
    assert differing(loop.state(), expected) == []
    loop.session.close()
    assert loop.session.stats.errors == 0
    opened = Store.open(str(store))
    assert verify(opened, read_data=True).problems == []
    opened.close()
