"""Run jobs whose ranks train apart, and average their parameters now and then (local SGD)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scarctl
from scarctl.distributed.digests import Digests
from tests.support.training import drained

EVERY = 2
"""Iterations from one average to the next."""
_OPTIMIZERS: dict[str, Any] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "one tensor": torch.optim.SGD,
}


class Apart:
    """A replica on each rank, with a batch of its own in each iteration."""

    def __init__(self, folder: str, optimizer: str, wrapped: str = "", policy: str = "aged") -> None:
        """wrapped: "ddp" or "ddp without buffers" average gradients in each iteration, otherwise nothing does."""
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        if not wrapped:
            self.model[1] = nn.LayerNorm(8)
        if optimizer == "one tensor":  # too small to be divided: one rank owns nothing
            self.model = nn.Linear(4, 1, bias=False)
        replicated = [] if wrapped else ["*"]
        if wrapped:
            self.model = DistributedDataParallel(self.model, broadcast_buffers=wrapped == "ddp")
        self.optimizer = _OPTIMIZERS[optimizer](self.model.parameters(), lr=0.01)
        Path(folder, "arena").mkdir(exist_ok=True)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=f"{folder}/store",
            ranks=scarctl.Ranks(replicated=replicated),
            interval=EVERY if policy == "aged" else 1,
            selection=scarctl.Selection(policy=policy),  # type: ignore[arg-type]
            settings=scarctl.Settings(arena_dir=f"{folder}/arena", daemon=False),
        )

    def iterate(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4, generator=generator)).square().mean().backward()
        self.optimizer.step()

    def train(self, steps: int, *, averages: bool) -> None:
        """Train, and return with the batch after the last of these steps in hand."""
        for number in self.session.batches(range(1, 100)):
            if number > steps:
                return
            self.iterate(number)
            if averages and number % EVERY == 0:
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= dist.get_world_size()


def evaluated(rank: int, world: int, folder: str) -> list[str]:
    """Train under DistributedDataParallel, seal every step, and evaluate other weights on one rank. Return the caveats.

    That rank reads its digests late, while the other weights are in place.
    """
    job, of = Apart(folder, "Adam", "ddp", policy="full"), Digests.of
    if rank == 1:
        Digests.of = lambda self, groups: _late(of(self, groups))  # type: ignore[method-assign]
    job.session.resume()
    for number in job.session.batches(range(1, 5)):
        job.iterate(number)
        if rank == 1:
            for factor in (0.5, 2.0):
                for parameter in job.model.parameters():
                    parameter.data.mul_(factor)
                time.sleep(0.3)
    drained([job.session])
    job.session._opening.close(failed=True)
    return [caveat.kind for caveat in job.session.caveats]


def _late(digests: Callable[[], dict[str, str]]) -> Callable[[], dict[str, str]]:
    def call() -> dict[str, str]:
        time.sleep(0.15)
        return digests()

    return call


def flushed(rank: int, world: int, folder: str, optimizer: str, steps: int, wrapped: str = "") -> list[str]:
    """Train, seal the state after the last step, and end as by a signal. Return the kinds of caveats."""
    job = Apart(folder, optimizer, wrapped)
    job.session.resume()
    job.train(steps, averages=not wrapped)
    job.session.flush()
    drained([job.session])
    job.session._opening.close(failed=True)
    return [caveat.kind for caveat in job.session.caveats]


def evacuated(rank: int, world: int, folder: str, optimizer: str, steps: int) -> dict[str, Any]:
    """Train, and return the report of an evacuation after the last step."""
    job = Apart(folder, optimizer)
    job.session.resume()
    job.train(steps, averages=True)
    found = job.session.evacuate(60.0).to_json()
    job.session._opening.close(failed=True)
    return found


def resumed(
    rank: int, world: int, folder: str, optimizer: str, wrapped: str = "", mode: str = "partial"
) -> dict[str, Any]:
    """Resume, and return the result."""
    job = Apart(folder, optimizer, wrapped)
    with job.session as session:
        found = session.resume(mode=mode)  # type: ignore[arg-type]
    return {
        "step": found.step,
        "consistent": found.consistent,
        "whole": found.report is None or found.report.whole,
        "reasons": list(found.reasons),
    }
