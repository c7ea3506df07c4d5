"""Test a loop that closes its session after a forward pass: the end of the last step is saved."""

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
    """Yield batches from torch's generator, as nanoGPT does."""
    while session.head_step < STEPS:
        yield torch.rand(4, 8), torch.randint(0, 2, (4,))


def numbered(session: scarctl.Session) -> Iterator[Any]:
    while session.head_step < STEPS:
        yield by_step(session.head_step)


def streamed(session: scarctl.Session) -> Iterator[Any]:
    """Yield the same batches in the recommended way."""
    yield from session.batches(drawn(session))


def measured_anew(model: nn.Sequential) -> None:
    """Average the weights, and measure the statistics of batch norm for them: `torch.optim.swa_utils.update_bn`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    torch.optim.swa_utils.update_bn([by_step(100 + number)[0] for number in range(3)], model)


def run(
    store: Path, batches: Any, *, last: int = -1, action: str = "close", dropout: float = 0.5, **given: Any
) -> tuple[Any, dict[str, Any]]:
    """Train until the end; or until the forward pass after step `last`, and then only do `action`."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 2)
    )
    optimizer = torch.optim.Adam(model.parameters())
    session = scarctl.attach(
        model,
        optimizer,
        store=store,
        **grouped(**{"policy": "full", "interval": 1, "partition_bytes": 4096, "daemon": False} | given),
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
    if action == "measure":
        measured_anew(model)
    session.close(seal=action != "snapshot")
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


def test_without_the_step_s_end_it_is_not_called_exact(tmp_path: Path) -> None:
    """No random numbers are drawn, so that only the buffers are of another step."""
    _, whole = run(tmp_path / "whole", numbered, dropout=0.0)
    not_kept: dict[str, Any] = {"dropout": 0.0, "flush_on_signal": False, "interval": 100}
    run(tmp_path / "store", numbered, last=STOP, **not_kept)
    resumed, ended = run(tmp_path / "store", numbered, **not_kept)
    assert differing(ended, whole), "what is tested"
    assert (resumed.step, resumed.exact) == (STOP, False)
    assert "buffers" in "; ".join(resumed.reasons)


@pytest.mark.parametrize("flush", [True, False])
def test_statistics_that_are_measured_after_the_last_step_are_saved(tmp_path: Path, flush: bool) -> None:
    _, closed = run(tmp_path / "store", numbered, action="measure", flush_on_signal=flush)
    resumed, restored = run(tmp_path / "store", numbered, flush_on_signal=flush)
    assert (resumed.step, resumed.exact, resumed.reasons) == (STEPS, True, ())
    assert differing(restored, closed) == []


def test_frozen_layers_run_first_and_without_gradients(tmp_path: Path) -> None:
    def trained(store: Path, last: int = -1) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(1)
        model = nn.ModuleList([nn.BatchNorm1d(8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))])
        optimizer = torch.optim.Adam(model[1].parameters())
        session = scarctl.attach(
            model, optimizer, store=store, **grouped(policy="full", interval=1, daemon=False)
        )
        session.resume()
        for x, y in numbered(session):
            with torch.no_grad():
                features = model[0](x)
            loss = functional.cross_entropy(model[1](features), y)
            if session.head_step == last:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        session.close()
        return session.resumed, {k: v.clone() for k, v in model.state_dict().items()}

    _, whole = trained(tmp_path / "whole")
    trained(tmp_path / "store", STOP)
    resumed, ended = trained(tmp_path / "store")
    assert (resumed.step, resumed.exact) == (STOP, True)
    assert differing(ended, whole) == []
