"""Test changes of the model that an open session refuses: they are reported, and not saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from scarctl.errors import Unavailable

CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "another dtype": lambda model, optimizer: (model.double(), optimizer.state.clear()),
    "moments of another dtype": lambda model, optimizer: [
        state.update(exp_avg=state["exp_avg"].half()) for state in optimizer.state.values()
    ],
    "another shape": lambda model, _: setattr(model, "weight", nn.Parameter(torch.zeros(2, 4))),
    "removed": lambda model, _: setattr(model, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_has_become_another_is_not_saved(tmp_path: Path, name: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    session = scarctl.attach(
        model, optimizer, store=tmp_path / "store", interval=1, settings=scarctl.Settings(daemon=False)
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    session.checkpoint(full=True, wait=True)
    CHANGES[name](model, optimizer)
    with pytest.raises(Unavailable, match="has changed since the layout was fixed"):
        session.checkpoint(full=True, wait=True)
    session.close()
    again = nn.Linear(4, 4)
    session = scarctl.attach(
        again,
        torch.optim.Adam(again.parameters()),
        store=tmp_path / "store",
        settings=scarctl.Settings(daemon=False),
    )
    assert session.resume().step == 1
    session.close()
