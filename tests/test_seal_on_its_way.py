"""A sealed state that waits for the store stays one, whatever training does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from scarctl.version import step_of
from tests.support.training import drained


@pytest.mark.parametrize("daemon", [True, False])
def test_partitions_that_a_seal_found_as_they_were_saved_wait_with_it(tmp_path: Path, daemon: bool) -> None:
    """Rows of a table that had no gradient are not copied again by a seal. They change in the steps after it."""
    torch.manual_seed(0)
    model = nn.Embedding(64, 8, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(
        model, optimizer, store=tmp_path / "store", rows={"*": 1}, interval=1, fraction=0.5, daemon=daemon
    )

    def step(rows: range) -> None:
        optimizer.zero_grad()
        model(torch.tensor(list(rows))).square().sum().backward()
        optimizer.step()

    step(range(8))
    session._finish()
    drained([session])
    engine = session._started()
    engine.saver.stop()
    step(range(8))
    session._finish()
    session.checkpoint(full=True)
    sealed, weight = session.head_step, model.weight.detach().clone()
    for first in (8, 16, 24):
        step(range(first, first + 8))
        session._finish()
    assert step_of(engine.arena.version).max() == sealed, "nothing is copied before it"
    engine.saver.resume()
    drained([session])
    assert step_of(engine.arena.sealed) == sealed
    step(range(32, 40))
    session._finish()
    drained([session])
    assert step_of(engine.arena.version).max() == sealed + 4, "then saving goes on"
    session.close(seal=False)

    again = nn.Embedding(64, 8, sparse=True)
    other = torch.optim.SGD(again.parameters(), lr=0.1)
    with scarctl.attach(again, other, store=tmp_path / "store", daemon=daemon) as session:
        resumed = session.resume(mode="rollback")
        assert resumed.exact
        assert resumed.step == sealed
        assert torch.equal(again.weight, weight)
