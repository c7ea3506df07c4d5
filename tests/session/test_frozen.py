"""Test that frozen parameters are not compared repeatedly, but saved if they are written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from tests.support.training import drained

ROWS = 256


class Job:
    """Trains a layer next to a frozen table of ROWS partitions; counts which of the table are compared."""

    def __init__(self, store: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"base": nn.Linear(8, ROWS, bias=False), "head": nn.Linear(ROWS, 2)})
        self.base = self.model["base"].weight.requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.compared = 0

        def norm(live: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> torch.Tensor:
            if live[""].shape[1] == 8:
                self.compared += len(live[""])
            return (live[""] - saved[""]).norm(dim=1)

        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            **grouped(
                **{"norm": norm, "interval": 1, "fraction": 1.0, "rows": {"base.weight": 1}, **options}
            ),
        )

    def step(self, *, settle: bool = True) -> None:
        self.optimizer.zero_grad()
        self.model["head"](self.model["base"](torch.randn(4, 8))).square().sum().backward()
        self.optimizer.step()
        self.session._saving.finish()
        if settle:
            drained([self.session])

    def compared_in_a_step(self) -> int:
        self.compared = 0
        self.step()
        return self.compared

    def saved(self) -> torch.Tensor:
        """Return the table as partial checkpoints have it: lost, and recovered."""
        live = self.base.clone()
        self.base.copy_(torch.full_like(live, torch.nan))
        self.session.recover("base.weight")
        found = self.base.clone()
        self.base.copy_(live)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = Job(tmp_path / "store")
    for _ in range(3):
        made.step()
    yield made
    made.session.close()


def in_place(base: torch.Tensor) -> None:
    base[3] += 1


def averaged(base: torch.Tensor) -> None:
    """Update it as an exponential moving average, which torch does not count."""
    base.data.mul_(0.9)


@pytest.mark.parametrize("write", [in_place, averaged])
def test_a_write_is_seen_by_the_next_checkpoint(job: Job, write: Callable[[torch.Tensor], None]) -> None:
    assert job.compared_in_a_step() < ROWS
    write(job.base)
    assert job.compared_in_a_step() >= ROWS
    assert torch.equal(job.saved(), job.base)


def test_a_recovery_of_what_is_frozen_brings_it_back(job: Job) -> None:
    before = job.base.clone()
    job.base.data[5:9] = torch.nan
    job.session.recover("base.weight[5:9]")
    assert torch.equal(job.base, before)
    job.step()
    assert torch.equal(job.saved(), before)


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
