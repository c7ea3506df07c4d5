"""Test copies of a state on a GPU, where training's changes are only queued."""

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
"""Clock cycles for which the GPU is kept busy, so that queued work runs late: a tenth of a second."""


def test_on_the_host_there_is_nothing_to_wait_for() -> None:
    streams = Streams()
    marks = streams.complete(streams.mark(), [torch.device("cpu")])
    assert marks == {}
    with streams.alongside(marks):
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
        assert session.resume().consistent
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
@pytest.mark.parametrize("kept", [True, False])
def test_another_thread_reads_after_what_a_stream_of_its_own_has_queued(tmp_path: Path, kept: bool) -> None:
    """Buffers, and the values that show whether weights were replaced: a signal's thread reads them, too."""
    with torch.cuda.stream(torch.cuda.Stream()):
        model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = scarctl.Settings(flush_on_signal=kept)
        session = scarctl.attach(model, optimizer, store=tmp_path / "store", interval=1, settings=settings)
        for late in (0, 0, 0, 20):
            loss = model(torch.randn(64, 256, device="cuda")).square().mean()
            for _ in range(late):
                torch.cuda._sleep(_LATE)  # longer than a flush waits for the next forward
            model(torch.randn(64, 256, device="cuda"))
            loss.backward()
            optimizer.step()
        thread = threading.Thread(target=session.flush)
        thread.start()
        thread.join()
        expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        session.close(seal=False)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scarctl.attach(model, optimizer, store=tmp_path / "store") as later:
        assert later.resume().consistent
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in model.state_dict().items())


@gpu
def test_what_comes_after_the_step_is_not_waited_for(tmp_path: Path) -> None:
    model, optimizer = _build()
    with scarctl.attach(model, optimizer, store=tmp_path / "store", interval=1, fraction=1.0) as session:
        _step(model, optimizer)
        for turn in range(4):
            _step(model, optimizer)
            model(torch.randn(64, 256, device="cuda"))
            later = torch.cuda.Event()
            for _ in range(20):
                torch.cuda._sleep(_LATE)
            later.record()
            session._saving.finish()
            if turn:  # a kernel's first use loads it, and waits for all of the GPU's work
                assert not later.query(), "the copy has ended before what was queued after it"
            torch.cuda.synchronize()


@gpu
def test_waiting_for_a_busy_gpu_is_no_stall(tmp_path: Path) -> None:
    model, optimizer = _build()
    with scarctl.attach(model, optimizer, store=tmp_path / "store", interval=1, fraction=1.0) as session:
        for _ in range(6):  # gradients are checked in the first iterations, and kernels are loaded
            _step(model, optimizer)
        torch.cuda.synchronize()
        before = session.stats.stall_seconds
        for _ in range(4):
            model(torch.randn(64, 256, device="cuda"))
            torch.cuda._sleep(
                _LATE
            )  # the copy waits for the step before it, and the GPU still works when it has ended
            _step(model, optimizer)
        torch.cuda.synchronize()
        assert session.stats.stall_seconds - before < 0.1


@gpu
def test_a_graph_is_captured_while_copies_are_made(tmp_path: Path, both_savers: str) -> None:
    """`torch.cuda.graph` forbids other threads most calls, and fails if they make them."""
    model, optimizer = _build()
    x = torch.randn(64, 256, device="cuda")
    large = nn.Linear(4096, 4096, device="cuda")
    both = nn.ModuleDict({"model": model, "large": large})
    with scarctl.attach(both, optimizer, store=tmp_path / "store", interval=1, fraction=1.0) as session:
        for _ in range(5):
            _step(model, optimizer)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = model(x)
            graph.replay()
            assert torch.allclose(found, model(x), rtol=1e-4, atol=1e-5)
        assert session.stats.errors == 0
