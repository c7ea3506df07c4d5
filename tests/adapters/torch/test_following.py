"""Test that parameters which forward passes change are found, and that other changes are none of these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl


class Momentum(nn.Module):
    """An encoder, and one that follows it: within the forward pass, or by a call."""

    def __init__(self, *, within: bool) -> None:
        super().__init__()
        self.query, self.key, self.within = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), within

    def follow(self) -> None:
        for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.within:
            self.follow()
        return (self.query(x) - self.key(x)).square().sum()


@pytest.mark.parametrize("within", [True, False])
def test_only_changes_within_the_forward_pass_are_said(
    tmp_path: Path, within: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Momentum(within=within)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    with scarctl.attach(model, optimizer, store=tmp_path / "store") as session:
        session.resume()
        for x in session.batches(torch.rand(6, 3, 4)):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            if not within:
                model.follow()
        found = ["changed-in-forward" in caveat.kind for caveat in session.caveats]
    assert found == ([True] if within else [])
    assert ("'key.weight' and perhaps other" in caplog.text) == within
