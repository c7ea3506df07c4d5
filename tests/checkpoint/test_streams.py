"""Copies of a state on a GPU, where what training does is only queued."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from scarctl.checkpoint.streams import Streams

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_LATE = 200_000_000
"""Clock cycles that the GPU is kept busy for, so that what is queued next comes late: a tenth of a second."""


def test_on_the_host_there_is_nothing_to_wait_for() -> None:
    streams = Streams()
    marks = streams.complete(streams.mark(), [torch.device("cpu")])
    assert marks == {}
    with streams.beside(marks):
        assert torch.zeros(3).add(1).sum() == 3


def _build() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(256, 256, device="cuda")
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    torch.cuda._sleep(_LATE)
    optimizer.step()


def _saved(store: Path) -> dict[str, torch.Tensor]:
    model, optimizer = _build()
    with scarctl.attach(model, optimizer, store=store) as session:
        assert session.resume().exact
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@gpu
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("by", ["close", "checkpoint", "flush elsewhere", "flush elsewhere, nothing taken"])
def test_what_is_copied_is_the_end_of_the_step(
    by: str, own_stream: bool, tmp_path: Path, both_savers: str
) -> None:
    model, optimizer = _build()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        taken = by != "flush elsewhere, nothing taken"
        session = scarctl.attach(
            model,
            optimizer,
            store=tmp_path / "store",
            interval=1,
            fraction=1.0,
            settings=scarctl.Settings(flush_on_signal=taken),
        )
        for _ in range(4):
            _step(model, optimizer)
        if by == "checkpoint":
            session.checkpoint(full=True, wait=True)
        elif by.startswith("flush elsewhere"):
            thread = threading.Thread(target=session.flush)
            thread.start()
            thread.join()
        expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        session.close(seal=by == "close")
    found = _saved(tmp_path / "store")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@gpu
def test_what_comes_after_the_step_is_not_waited_for(tmp_path: Path) -> None:
    model, optimizer = _build()
    with scarctl.attach(model, optimizer, store=tmp_path / "store", interval=1, fraction=1.0) as session:
        _step(model, optimizer)
        for _ in range(3):
            _step(model, optimizer)
            later = torch.cuda.Event()
            for _ in range(20):
                torch.cuda._sleep(_LATE)
            later.record()
            session._finish()
            assert not later.query(), "the copy has ended before what was queued after it"
            torch.cuda.synchronize()
