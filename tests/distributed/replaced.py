"""Run jobs of several ranks that change state between two steps: weights through `.data`, or only extras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import scarctl
from tests.distributed.jobs import build, step
from tests.support.training import drained


class Job:
    """A model, and the objects that train and save it."""

    def __init__(self, kind: str, folder: str) -> None:
        self.model, self.optimizer = build(kind)
        self.average = {"norm": torch.zeros(1)}
        Path(folder, "arena").mkdir(exist_ok=True)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=f"{folder}/store",
            extras={"average": scarctl.Extra(self.average, after_step=True)},
            interval=1,
            settings=scarctl.Settings(arena_dir=f"{folder}/arena", daemon=False),
        )


def put(model: nn.Module, factor: float) -> None:
    """Scale this rank's part of all parameters, without torch counting the writes."""
    for parameter in model.parameters():
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        part.data.mul_(factor)


def flushed(rank: int, world: int, kind: str, folder: str, swapped: list[int], averaged: list[int]) -> None:
    """Take three steps, seal their state, and end.

    swapped: ranks that replace the weights before. averaged: ranks that change an extra after the seal, and seal the
    state again.
    """
    job = Job(kind, folder)
    job.session.resume()
    for number in range(1, 4):
        step(job.model, job.optimizer, number)
    if rank in swapped:
        put(job.model, 0.5)
    job.session.flush()
    if rank in averaged:
        job.average["norm"] += 1
        job.session.flush()
    drained([job.session])
    job.session._opening.close(failed=True)  # as a signal ends it


def resumed(rank: int, world: int, kind: str, folder: str) -> dict[str, Any]:
    """Resume, and return the result."""
    with Job(kind, folder).session as session:
        found = session.resume()
    return {"step": found.step, "exact": found.exact, "reasons": list(found.reasons)}
