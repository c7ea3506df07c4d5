"""What an adapter derives from its groups is computed again after a recovery in the running process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from scarctl_adapters.torch import TorchAdapter


def test_a_partial_recovery_derives_again_from_what_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the values are there. A resume does not: the adapter's `restore` does so."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        TorchAdapter, "derive", lambda self: seen.append(self.groups()[0].tensors[""].clone()), raising=False
    )
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with scarctl.attach(model, optimizer, store=tmp_path / "store") as session:
        session.resume()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        session.checkpoint(full=True, wait=True)
        kept = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.fill_(torch.nan)
        assert not seen
        session.recover("weight")
    assert [torch.equal(values, kept) for values in seen] == [True]
