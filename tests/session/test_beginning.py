"""Test a loop's work before the batches of an epoch: its effect comes once, and unrestorable state is reported."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import scarctl
from scarctl.config import grouped
from scarctl.session.loader import Hidden, restore_states, states_of
from scarctl.state.torch_dtypes import plain, private
from tests.loops.oversights import Lazy
from tests.loops.rig import net, train


def attached(store: Path, **given: Any) -> tuple[nn.Sequential, Any, scarctl.Session]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = grouped(interval=1, policy="full", daemon=False)
    return model, optimizer, scarctl.attach(model, optimizer, store=store, **given, **options)


def stopped(store: Path, loader: Any, *, after: int, **given: Any) -> None:
    """Run until closed after this many steps of the first epoch; 0: at its end."""
    model, optimizer, session = attached(store, **given)
    session.resume()
    for _ in session.epochs(1):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            if session.head_step == after:
                session.close()
                return
    session.close()


class Meter:
    """Fails to return its state while `away`."""

    away = False

    def state_dict(self) -> dict[str, int]:
        if self.away:
            raise OSError("the meter is away")
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_an_object_that_cannot_be_read_then_is_said_and_does_not_reach_training(tmp_path: Path) -> None:
    loader = [(torch.ones(4, 8), torch.tensor([0, 1, 0, 1]))] * 5
    meter = Meter()
    stopped(tmp_path / "store", loader, after=2, extras={"meter": meter})
    model, optimizer, session = attached(tmp_path / "store", extras={"meter": meter})
    session.resume()
    meter.away = True
    for _ in session.epochs(1):
        for batch in session.batches(loader):
            meter.away = False
            train(model, optimizer, batch)
    session.close()
    assert session.resumed is not None
    assert (session.head_step, session.stats.errors, session.resumed.exact) == (5, 1, False)
    assert "the meter is away" in "; ".join(session.resumed.reasons)


def test_a_change_between_the_resume_and_the_loop_stays(tmp_path: Path) -> None:
    loader = [(torch.ones(4, 8), torch.tensor([0, 1, 0, 1]))] * 5
    stopped(tmp_path / "store", loader, after=2)
    model, _, session = attached(tmp_path / "store")
    session.resume()
    with torch.no_grad():
        model[0].weight.mul_(3)
    mine, bias = model[0].weight.clone(), model[0].bias.clone()
    for _ in session.epochs(1):
        model[0].bias.data.mul_(0.5)
        next(iter(session.batches(loader)))
        break
    assert session.resumed is not None
    assert torch.equal(model[0].weight, mine)
    assert torch.equal(model[0].bias, bias)
    session.close()


def test_what_is_written_over_such_a_change_is_reported(tmp_path: Path) -> None:
    loader = [(torch.ones(4, 8), torch.tensor([0, 1, 0, 1]))] * 5
    stopped(tmp_path / "store", loader, after=2)
    model, _, session = attached(tmp_path / "store")
    assert session.resume().exact
    with torch.no_grad():
        model[0].weight.mul_(3)
    for _ in session.epochs(1):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        next(iter(session.batches(loader)))
        break
    assert session.resumed is not None
    assert any("changes weights before the first batch" in reason for reason in session.resumed.reasons)
    session.close()


def test_a_generator_that_was_made_with_the_first_item_is_missed_between_epochs(tmp_path: Path) -> None:
    stopped(tmp_path / "store", DataLoader(Lazy(), batch_size=4), after=0)
    model, optimizer, session = attached(tmp_path / "store")
    assert session.resume().step == 5
    loader = DataLoader(Lazy(), batch_size=4)
    for _ in session.epochs(2):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
    session.close()
    assert session.resumed is not None
    assert session.head_step == 10
    assert any("other random generators" in reason for reason in session.resumed.reasons)


def test_generators_are_looked_for_again_and_the_systems_has_no_state() -> None:
    data = Lazy()
    hidden = Hidden(DataLoader(data, batch_size=4))
    assert isinstance(data.system, SystemRandom)
    assert hidden.find() == []
    data[0]
    assert hidden.find() == [data.rng]
    kept = states_of(hidden.find())
    first = data.rng.random()
    assert not restore_states([], kept)
    assert restore_states(hidden.find(), kept)
    assert data.rng.random() == first


def test_a_private_copy_stays_when_arrays_and_sets_change_in_place() -> None:
    state: Any = {"order": np.arange(5), "seen": {1, 2}, "counts": Counter("aab"), "list": [np.zeros(2)]}
    kept = private(state)
    state["order"][:] = 0
    state["seen"].add(3)
    state["counts"]["a"] = 9
    state["list"][0][:] = 1
    found: Any = plain(kept)
    assert found["order"].tolist() == [0, 1, 2, 3, 4]
    assert found["seen"] == {1, 2}
    assert found["counts"] == Counter("aab")
    assert found["list"][0].tolist() == [0, 0]
