"""A loop that closes its session within an iteration, after the forward pass: the step's end is what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import scarctl
from scarctl.config import grouped
from tests.loops.rig import by_step
from tests.support.training import differing

STEPS, STOP = 9, 4


def drawn(session: scarctl.Session) -> Iterator[Any]:
    """Batches from torch's generator, as nanoGPT's."""
    while session.head_step < STEPS:
        yield torch.rand(4, 8), torch.randint(0, 2, (4,))


def numbered(session: scarctl.Session) -> Iterator[Any]:
    while session.head_step < STEPS:
        yield by_step(session.head_step)


def streamed(session: scarctl.Session) -> Iterator[Any]:
    """The same as `drawn`, in the way that is recommended."""
    yield from session.batches(drawn(session))


def run(store: Path, batches: Any, *, last: int = -1, action: str = "close") -> tuple[Any, dict[str, Any]]:
    """Train up to the end; or until the forward pass after step `last`, and then only do `action`."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters())
    session = scarctl.attach(
        model,
        optimizer,
        store=store,
        **grouped(policy="full", interval=1, partition_bytes=4096, daemon=False),
    )
    resumed = session.resume()
    for x, y in batches(session):
        loss = functional.cross_entropy(model(x), y)
        if session.head_step == last:
            if action == "snapshot":
                session.snapshot("within")
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    session.close(seal=action == "close")
    return session.resumed or resumed, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("batches", [drawn, numbered, streamed])
def test_it_resumes_exactly(tmp_path: Path, batches: Any) -> None:
    _, whole = run(tmp_path / "whole", batches)
    run(tmp_path / "store", batches, last=STOP)
    resumed, ended = run(tmp_path / "store", batches)
    assert (resumed.step, resumed.exact, resumed.reasons) == (STOP, True, ())
    assert differing(ended, whole) == []


def test_a_snapshot_within_an_iteration_too(tmp_path: Path) -> None:
    _, whole = run(tmp_path / "whole", drawn)
    run(tmp_path / "store", drawn, last=STOP, action="snapshot")
    resumed, ended = run(tmp_path / "store", drawn)
    assert (resumed.step, resumed.exact) == (STOP, True)
    assert differing(ended, whole) == []
