"""Test that a sealed state that waits for the store stays sealed, whatever training does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from scarctl.state.version import step_of
from tests.support.training import drained


class Job:
    """A table of which a step changes some rows."""

    def __init__(self, store: Path, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(64, 8, sparse=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        given = {"rows": {"*": 1}, "fraction": 0.5, **options}
        self.session = scarctl.attach(self.model, self.optimizer, store=store, **grouped(**given))

    def step(self, rows: range) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor(list(rows))).square().sum().backward()
        self.optimizer.step()
        self.session._saving.finish()


@pytest.mark.leaves_arena
def test_partitions_that_a_seal_found_as_they_were_saved_wait_with_it(tmp_path: Path) -> None:
    """Rows of a table without a gradient are not copied again. The store gets the newest state, and not one between."""
    job = Job(tmp_path / "store", interval=1, daemon=False)
    session, step = job.session, job.step
    step(range(8))
    drained([session])
    engine = session._started()
    engine.saver.stop()
    step(range(8))
    session.checkpoint(full=True)
    for first in (8, 16, 24):
        step(range(first, first + 8))
    sealed, weight = session.head_step, job.model.weight.detach().clone()
    assert step_of(engine.arena.version).max() == sealed, "memory does not wait"
    engine.saver.resume()
    drained([session])
    assert step_of(engine.arena.sealed) == sealed
    step(range(32, 40))
    drained([session])
    assert step_of(engine.arena.version).max() == sealed + 1
    session.close(seal=False)

    (tmp_path / "other").mkdir()
    again = Job(tmp_path / "store", daemon=False, arena_dir=tmp_path / "other")
    resumed = again.session.resume(mode="rollback")
    assert resumed.consistent
    assert resumed.step == sealed
    assert torch.equal(again.model.weight, weight)
    again.session.close(seal=False)
