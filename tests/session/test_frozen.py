"""Test layers that are frozen or thawed while a session is open."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import scarctl


class Adam:
    """A layer gets no gradient for three steps, because it is frozen or unused, and the opposite afterwards."""

    def __init__(self, store: Path, *, frozen: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"base": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.frozen = frozen
        self.model["base"].requires_grad_(not frozen)
        self.session = scarctl.attach(self.model, self.optimizer, store=store, interval=1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(4, 4)
            y = self.model["base"](x) if self.frozen else x
            self.model["head"](y).square().sum().backward()
            self.optimizer.step()


def test_moments_of_what_is_thawed_are_never_left_out_unsaid(tmp_path: Path) -> None:
    run = Adam(tmp_path / "store", frozen=True)
    run.train(3)
    run.session.checkpoint(full=True, wait=True)
    run.model["base"].requires_grad_(True)
    run.train(2)
    assert run.session.stats.errors
    assert (
        "'base.weight' has gained optimizer state since the layout was fixed: exp_avg"
        in run.session.stats.last_error
    )
    run.session.close()
    again = Adam(tmp_path / "store", frozen=True)
    assert again.session.resume().step == 3
    again.train(1)
    again.session.close()


def test_what_never_got_a_gradient_may_be_frozen(tmp_path: Path) -> None:
    run = Adam(tmp_path / "store", frozen=False)
    run.train(3)
    run.model["base"].requires_grad_(False)
    run.train(2)
    assert run.session.stats.errors == 0
    run.session.close()
    again = Adam(tmp_path / "store", frozen=False)
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent) == (5, True)
    again.train(1)
    again.session.close()
