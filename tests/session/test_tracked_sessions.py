"""Test that sessions see what has changed since memory's copies, though they do not compare everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import scarctl
from scarctl.config import grouped
from scarctl.errors import Unavailable
from tests.support.training import drained


class Recommender(torch.nn.Module):
    """A table with sparse gradients, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.EmbeddingBag(500, 64, mode="sum", sparse=True)
        self.hidden = torch.nn.Linear(64, 128)
        self.out = torch.nn.Linear(128, 1)

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.table(bags)).relu())  # type: ignore[no-any-return]


class Job:
    """A loop with a separate optimizer for the table."""

    def __init__(self, store: Path, seed: int = 0, **options: object) -> None:
        torch.manual_seed(seed)
        self.model = Recommender()
        dense = [*self.model.hidden.parameters(), *self.model.out.parameters()]
        self.optimizers = [
            torch.optim.SparseAdam(self.model.table.parameters(), lr=0.01),
            torch.optim.Adam(dense, lr=0.01),
        ]
        settings = {"rows": {"table.*": 1, "hidden.weight": 64}, "interval": 2, **options}
        self.session = scarctl.attach(self.model, self.optimizers, store=store, **grouped(**settings))  # type: ignore[arg-type]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            bags = (500 * torch.rand(8, 4) ** 3).long()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.model(bags).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.session._saving.finish()
            drained([self.session])


def exact_and_found(session: scarctl.Session) -> tuple[np.ndarray, np.ndarray]:
    engine = session._started()
    live = session._binding.live(engine.arena)
    return live.distances(), engine.tracker.look(live, thorough=False)[0]


@pytest.mark.parametrize(("tracker", "seal"), [("exact", True), ("auto", False)])
def test_distances_are_right_after_a_restart_a_recovery_and_a_rollback(
    tmp_path: Path, tracker: str, seal: bool
) -> None:
    rows = {"table.*": 1, "hidden.weight": 1}
    first = Job(tmp_path / "store", tracker=tracker, rows=rows)
    first.train(9)
    first.session.close(seal=seal)
    job = Job(tmp_path / "store", seed=9, tracker=tracker, rows=rows)
    resumed = job.session.resume()
    assert (resumed.step, resumed.consistent) == (9 if seal else 8, True)
    exact, found = exact_and_found(job.session)
    assert not exact.any()
    assert not found.any()
    job.train(3)
    for change in (
        lambda: job.session.recover("table.weight[100:300]"),
        lambda: job.session.checkpoint(full=True, wait=True),
        lambda: job.session.recover("all", mode="rollback"),
    ):
        np.testing.assert_allclose(*exact_and_found(job.session), rtol=1e-4)
        change()
        np.testing.assert_allclose(*exact_and_found(job.session), rtol=1e-4)
        job.train(3)
    assert job.session.stats.errors == 0
    job.session.close()


def test_a_gradient_that_cannot_be_read_ends_no_training(tmp_path: Path) -> None:
    job = Job(tmp_path / "store", interval=1000)
    job.train(2)

    def broken(*, dense: bool) -> None:
        raise RuntimeError("no gradients today")

    job.session._steps.touched = lambda: broken(dense=True)
    job.train(2)
    assert "no gradients today" in job.session.stats.last_error
    np.testing.assert_allclose(*exact_and_found(job.session), rtol=1e-4)
    job.session.close(seal=False)


def test_a_failed_rollback_leaves_memory_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"table": torch.nn.EmbeddingBag(4000, 4, mode="sum", sparse=True)})
    model["scale"] = torch.nn.Linear(4, 80)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = {"table.weight": 1, "scale.weight": 1}
    with scarctl.attach(
        model,
        optimizer,
        store=tmp_path / "store",
        interval=2,
        fraction=1.0,
        partitioning=scarctl.Partitioning(rows=rows),
    ) as session:
        for step in range(10):
            if step == 5:
                model["scale"].requires_grad_(False)
            optimizer.zero_grad()
            model["scale"](model["table"](torch.tensor([[3 * step, 3 * step + 1]]))).square().sum().backward()
            optimizer.step()
            session._saving.finish()
            drained([session])
        exact_and_found(session)
        exact_and_found(session)
        with monkeypatch.context() as patch:
            patch.setattr(
                session._started(), "forget_after", lambda plan: (_ for _ in ()).throw(Unavailable("away"))
            )
            with pytest.raises(Unavailable):
                session.recover("all", mode="rollback")
        exact, found = exact_and_found(session)
        assert not exact.any()
        assert not found.any()


def test_a_table_with_large_partitions_is_advised_smaller_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    with caplog.at_level("INFO", "scarctl"):
        for name, rows in (("default", None), ("default", None), ("fine", {"table.weight": 1})):
            caplog.clear()
            job = Job(tmp_path / name, rows=rows)
            with job.session as session:
                session.resume()
                job.train(2)
            said.append([r.getMessage() for r in caplog.records if "embedding tables" in r.getMessage()])
    assert [len(one) for one in said] == [1, 0, 0], "once, when there is a choice"
    assert "5 of 'table.weight'" in said[0][0]
