"""Test ranks that train apart between two averages: a state that is another one on each rank is never called exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import scarctl
from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.distributed.launch import launch
from tests.support.training import drained

EVERY = 2
"""Iterations from one average to the next."""


class Apart:
    """A replica on each rank, with a batch of its own in each iteration."""

    def __init__(self, folder: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01)
        Path(folder, "arena").mkdir(exist_ok=True)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=f"{folder}/store",
            ranks=scarctl.Ranks(replicated=["*"]),
            interval=EVERY,
            settings=scarctl.Settings(arena_dir=f"{folder}/arena", daemon=False),
        )

    def iterate(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4, generator=generator)).square().mean().backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        """Train, and return with the batch after the last of these steps in hand."""
        for number in self.session.batches(range(1, 100)):
            if number > steps:
                return
            self.iterate(number)
            if number % EVERY == 0:
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= dist.get_world_size()


def flushed(rank: int, world: int, folder: str, optimizer: str, steps: int) -> list[str]:
    """Train, seal the state after the last step, and end as by a signal. Return the kinds of caveats."""
    job = Apart(folder, optimizer)
    job.session.resume()
    job.train(steps)
    job.session.flush()
    drained([job.session])
    job.session._opening.close(failed=True)
    return [caveat.kind for caveat in job.session.caveats]


def resumed(rank: int, world: int, folder: str, optimizer: str) -> dict[str, Any]:
    """Resume, and return the result."""
    job = Apart(folder, optimizer)
    with job.session as session:
        found = session.resume()
    return {
        "step": found.step,
        "consistent": found.consistent,
        "whole": found.label.of_one,
        "reasons": list(found.reasons),
    }


FLUSHED, RESUMED = "tests.distributed.test_averages:flushed", "tests.distributed.test_averages:resumed"


@pytest.mark.parametrize(
    ("optimizer", "steps", "exact"),
    [
        pytest.param("SGD", 31, False, id="between two averages"),
        pytest.param("SGD", 30, True, id="at an average"),
        pytest.param("Adam", 30, False, id="at an average, with moments that are not averaged"),
    ],
)
@pytest.mark.long
def test_a_state_that_is_another_one_on_each_rank(
    tmp_path: Path, optimizer: str, steps: int, exact: bool
) -> None:
    for kinds in launch(FLUSHED, 2, str(tmp_path), optimizer, steps):
        # Each comparison of the running ranks comes after an average.
        assert "ranks-differ" not in kinds
    shown = [caveat.kind for caveat in survey(Store.open(f"{tmp_path}/store"), None).caveats]
    assert ("ranks-differ" in shown) is not exact
    for found in launch(RESUMED, 2, str(tmp_path), optimizer):
        assert (found["step"], found["whole"], found["consistent"]) == (steps, True, exact)
        assert exact or any("ranks had different values" in reason for reason in found["reasons"]), found
