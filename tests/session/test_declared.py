"""Test what a declared end of a step saves, and what is said of a loop that declares none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import scarctl
from scarctl.cli.inspect_view import summary
from scarctl.config import grouped
from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.support.training import differing, state_of

DATA = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(10)]


class Job:
    """A loop with batch norm, dropout, a schedule and shuffled data."""

    def __init__(self, store: Path, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.count = {"steps": 0}
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            schedulers=self.scheduler,
            extras={"count": self.count},
            **grouped(interval=2, daemon=False, **options),
        )
        self.resumed = self.session.resume()

    def train(self, until: int, *, declares: bool = True) -> None:
        loader = DataLoader(DATA, batch_size=None, shuffle=True)  # type: ignore[arg-type]
        for _ in self.session.epochs(3) if declares else range(3):
            for x in self.session.batches(loader) if declares else loader:
                self.step(x)
                if self.session.head_step == until:
                    return

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.count["steps"] += 1

    def state(self) -> dict[str, torch.Tensor]:
        return state_of(self.model, self.optimizer)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    job = Job(tmp_path_factory.mktemp("whole") / "store", arena_dir=str(tmp_path_factory.mktemp("arena")))
    job.train(30)
    job.session.close()
    return job.state()


@pytest.mark.parametrize(("until", "kept"), [(7, True), (10, False)])
def test_a_loop_that_is_left_and_closed_continues_bit_for_bit(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], until: int, kept: bool
) -> None:
    first = Job(tmp_path / "store", flush_on_signal=kept)
    first.train(until)
    first.session.close()
    again = Job(tmp_path / "store", flush_on_signal=kept)
    assert (again.resumed.step, again.resumed.consistent, again.resumed.label.declared) == (until, True, True)
    assert again.count == {"steps": until}
    again.train(30)
    again.session.close()
    assert differing(again.state(), undisturbed) == []


def test_a_whole_checkpoint_after_the_loop_is_consistent(tmp_path: Path) -> None:
    job = Job(tmp_path / "store")
    job.train(7)
    job.session.checkpoint(full=True, wait=True)
    job.session.close(seal=False)
    again = Job(tmp_path / "store")
    assert str(again.resumed).startswith("step 7, consistent; ")
    assert again.resumed.label.to_json() == {
        "consistent": True,
        "oldest_step": 7,
        "newest_step": 7,
        "reasons": [],
        "position": "declared",
    }
    again.session.close()


def test_a_loop_that_declares_nothing_is_told_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "scarctl"):
        job = Job(tmp_path / "store")
        job.train(5, declares=False)
        job.session.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "the position in the data is not saved" in said[0]
    assert "session.batches" in said[0]
    again = Job(tmp_path / "store")
    assert (again.resumed.step, again.resumed.consistent, again.resumed.label.declared) == (5, True, False)
    assert "the position in the data is unknown" in str(again.resumed)
    assert again.count == {"steps": 5}, (
        "extras are read at the beginning of the next step, and when it is closed"
    )
    again.session.close()


def test_a_run_that_was_closed_is_finished(tmp_path: Path) -> None:
    job = Job(tmp_path / "store")
    job.train(5)
    job.session.close()
    store = Store.open(tmp_path / "store")
    found = summary(survey(store, None))
    store.close()
    assert ": finished at step 5, " in found[0]
    assert "lower bounds" not in found[1]
