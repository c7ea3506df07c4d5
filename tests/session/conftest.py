"""Provide an uninterrupted run for comparisons, and fillings of memory that wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from scarctl.checkpoint import filling
from scarctl.checkpoint.filling import Filling
from tests.session.flushed import MORE, STEPS
from tests.support.training import Loop


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums are equal in every process: a forked child has no other anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the state after all steps of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    loop = Loop(folder / "store", arena_dir=folder, daemon=False)
    loop.train(STEPS + MORE)
    loop.session.close()
    return loop.state()


@pytest.fixture
def small_states_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the arena of a small state after its resume, as that of a large one."""
    monkeypatch.setattr(filling, "_WORTH", 0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold up every filling until it is set."""
    gate, run = threading.Event(), Filling.run

    def held(self: Filling) -> None:
        assert gate.wait(60)
        run(self)

    monkeypatch.setattr(Filling, "run", held)
    yield gate
    gate.set()
