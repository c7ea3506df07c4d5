"""Test that copies in memory stay as recent with a stopped store as with a fast one, and the store loses nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from scarctl.persist.persister import Persister
from scarctl.state.version import step_of
from scarctl.store import Store, verify
from scarctl.store.backends.base import Buffer
from tests.support.training import drained


class Table:
    """A table of 64 rows, all of which change in a step, the first ones by far the most."""

    def __init__(self, store: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(64, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        given = {"rows": {"*": 1}, "daemon": False, "interval": 1, **options}
        self.session = scarctl.attach(self.model, self.optimizer, store=store, **grouped(**given))

    def step(self) -> None:
        self.optimizer.zero_grad()
        weight = self.model.weight
        (weight.sum() + 100 * weight[:4].sum()).backward()
        self.optimizer.step()
        self.session._saving.finish()
        time.sleep(0.01)

    def oldest_copy(self) -> int:
        """Return how many iterations the oldest copy in memory is behind."""
        arena = self.session._started().arena
        return self.session.head_step - int(step_of(arena.newest()).min())


class Reader:
    """Replaces the persister's reading of rows: it may hang, or be slow."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.hangs = threading.Event()
        self.seconds = 0.0
        real = Persister._uninterrupted

        def source(persister: Persister, *arguments: Any) -> Buffer:
            if not self.goes_on.is_set():
                self.hangs.set()
                self.goes_on.wait(60)
            time.sleep(self.seconds)
            return real(persister, *arguments)

        patch.setattr(Persister, "_uninterrupted", source)


def test_a_store_that_hangs_in_the_middle_of_a_copy_keeps_nothing_old_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    table = Table(tmp_path / "store", fraction=1.0)
    for _ in range(5):
        table.step()
    drained([table.session])
    reader.goes_on.clear()
    while not reader.hangs.is_set():
        table.step()
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline or table.oldest_copy() > 2:
        table.step()
        assert time.monotonic() < deadline + 60
    for _ in range(20):
        table.step()
        assert table.oldest_copy() <= 2
    assert table.session.lag >= 20, "what the store has not is said, however young memory is"
    reader.goes_on.set()
    table.session.close()
    store = Store.open(tmp_path / "store")
    assert verify(store, read_data=True).problems == []
    store.close()
    again = Table(tmp_path / "store")
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent) == (table.session.head_step, True)
    assert torch.equal(again.model.weight, table.model.weight)
    again.session.close()
