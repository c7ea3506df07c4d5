"""Test that an object that cannot return its state for a moment costs a checkpoint, and never training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.config import grouped


class Counter:
    """Fails to return its state while `away`."""

    def __init__(self) -> None:
        self.count = 0
        self.away = False

    def state_dict(self) -> dict[str, int]:
        if self.away:
            raise OSError("the meter is away")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Meter(Counter, torch.optim.lr_scheduler.LRScheduler):
    """A meter that is read when schedules are, not when extras are."""

    def step(self, epoch: int | None = None) -> None:
        self.count += 1


class Job:
    def __init__(self, store: Path, role: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.meter = Meter() if role == "schedule" else Counter()
        given = {
            "extra": {"extras": {"meter": self.meter}},
            "schedule": {"schedulers": self.meter},
        }[role]
        settings = {"interval": 2, "daemon": False, "flush_on_signal": False, **options}
        self.session = scarctl.attach(self.model, self.optimizer, store=store, **given, **grouped(**settings))

    def train(self, batches: Iterable[int], *, away: Iterable[int] = ()) -> None:
        for number in batches:
            self.meter.away = number in away
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 64)).square().mean().backward()
            self.meter.count += 1
            self.optimizer.step()


@pytest.mark.parametrize(("role", "read", "away"), [("extra", True, 6), ("schedule", False, 2)])
def test_what_an_object_raises_while_it_is_read_does_not_reach_training(
    tmp_path: Path, role: str, read: bool, away: int
) -> None:
    job = Job(tmp_path / "store", role)
    batches = range(1, 11)
    if read:
        for _ in job.session.epochs(1):
            job.train(job.session.batches(batches), away=[away])
    else:
        job.train(batches, away=[away])
    assert job.session.head_step == 10
    job.session.close()
    assert job.session.stats.last_error in ("", "the meter is away")

    again = Job(tmp_path / "store", role)
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent, again.meter.count) == (10, True, job.meter.count)
    again.session.close()
