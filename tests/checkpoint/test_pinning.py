"""Test which calls to CUDA pin the arena, and when; on a GPU, that it is pinned."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
from scarctl.arena.arena import Arena
from scarctl.checkpoint import pinning
from scarctl.checkpoint.pinning import Pinning
from scarctl.state.layout import TensorSpec, build_layout

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_ALREADY_REGISTERED = 712


class Runtime:
    """The two calls with CUDA's rules: registered memory must not overlap, and is unregistered only once."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.threads: set[str] = set()
        self.devices: list[torch.device] = []
        self.go = threading.Event()
        self.go.set()

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[Runtime]:
        self.devices.append(device)
        yield self

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:  # noqa: N802
        self.go.wait()
        self.threads.add(threading.current_thread().name)
        if any(at < other + length and other < at + size for other, length in self.registered.items()):
            return _ALREADY_REGISTERED
        self.registered[at] = size
        return 0

    def cudaHostUnregister(self, at: int) -> int:  # noqa: N802
        self.registered.pop(at)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(pinning, "_runtime", found.on)
    return found


def _arena() -> Arena:
    specs = tuple(TensorSpec(slot, "F32", (1000, 3)) for slot in ("", "exp_avg"))
    return Arena.anonymous(build_layout([("a", "parameter", specs), ("b", "parameter", specs)]))


_GPU = torch.device("cuda", 1)


def test_all_tensors_of_the_arena_are_one_piece(runtime: Runtime) -> None:
    arena = _arena()
    memory = arena.memory()
    for g in range(2):
        for t in range(2):
            arena.rows(g, t)[:] = 1 + 2 * g + t
    assert memory.ctypes.data % os.sysconf("SC_PAGE_SIZE") == 0
    assert np.bincount(memory)[1:].tolist() == [12000] * 4
    held = Pinning(memory)
    held.begin(_GPU)
    held.begin(_GPU)
    held.end()
    assert runtime.registered == {}
    assert runtime.threads == {"scarctl-pin"}, "an error would stay with the thread that trains"
    assert runtime.devices == [_GPU, _GPU], "on another it would make a context"


def test_it_is_waited_for_before_it_is_taken_back(runtime: Runtime) -> None:
    held = Pinning(_arena().memory())
    runtime.go.clear()
    held.begin(_GPU)
    ending = threading.Thread(target=held.end)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive()
    runtime.go.set()
    ending.join()
    assert runtime.registered == {}


def test_what_nobody_has_ended_ends_with_its_owner(runtime: Runtime) -> None:
    held = Pinning(_arena().memory())
    held.begin(_GPU)
    del held
    gc.collect()
    assert runtime.threads
    assert runtime.registered == {}


def test_an_interpreter_that_ends_pins_nothing_more(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    held = Pinning(_arena().memory())
    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", start)
        held.begin(_GPU)
    held.end()
    assert runtime.devices == []


def test_a_refusal_is_told_and_changes_nothing(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    memory = _arena().memory()
    first, second = Pinning(memory), Pinning(memory)
    first.begin(_GPU)
    assert first._thread is not None
    first._thread.join()
    with caplog.at_level(logging.WARNING):
        second.begin(_GPU)
        second.end()
    assert f"cannot be pinned (CUDA error {_ALREADY_REGISTERED})" in caplog.text
    assert len(runtime.registered) == 1, "what another has registered is not taken back"
    first.end()


def test_a_state_on_the_host_is_not_pinned(tmp_path: Path, runtime: Runtime) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scarctl.attach(
        model, optimizer, store=tmp_path / "store", interval=1, settings=scarctl.Settings(daemon=False)
    ):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert runtime.threads == set()


@gpu
@pytest.mark.parametrize("pin", [True, False])
def test_on_a_gpu_the_arena_is_pinned(tmp_path: Path, pin: bool) -> None:
    folder = tempfile.mkdtemp(dir="/dev/shm")  # CUDA pins no file on a disk
    settings = scarctl.Settings(pin_memory=pin, arena_dir=folder, daemon=False)
    model = nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    with scarctl.attach(model, optimizer, store=tmp_path / "store", interval=1, settings=settings) as session:
        for _ in range(3):
            model(torch.ones(1, 512, device="cuda")).sum().backward()
            optimizer.step()
        engine = session._engine
        assert engine is not None
        if pin:
            assert engine.pinning._thread is not None
            engine.pinning._thread.join()
        saved = torch.from_numpy(engine.arena.rows(0, 0))
        assert saved.is_pinned() == pin
    assert not saved.is_pinned(), "it may be mapped by somebody else by now"
    torch.cuda.synchronize()
    shutil.rmtree(folder)
