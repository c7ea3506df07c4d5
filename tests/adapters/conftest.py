"""Fixtures for tests that compare runs bit by bit, some of them in forked processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from scarctl.testing import killed_runs
from tests.support import forkserver


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: a forked process has no others, so its sums would have another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process that a suite kills from one that has imported torch. Its hashes have another seed than here.

    The suite of torch starts an interpreter, as for all adapters that are not in this tree.
    """
    monkeypatch.setattr(killed_runs, "subprocess", forkserver.Forks())
