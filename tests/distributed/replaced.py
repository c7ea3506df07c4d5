"""Run jobs of several ranks that change state between two steps: weights through `.data`, or only extras."""

from __future__ import annotations

import time
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
            extras={"average": self.average},
            interval=1,
            settings=scarctl.Settings(arena_dir=f"{folder}/arena", daemon=False),
        )


def put(model: nn.Module, factor: float, *, behind: bool) -> None:
    """Scale this rank's part of all parameters, without torch counting the writes.

    behind: put another part behind each sharded parameter, instead of writing to it.
    """
    for parameter in model.parameters():
        part: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if behind:
            parameter._local_tensor = part.detach() * factor
        else:
            part.data.mul_(factor)


def flushed(
    rank: int,
    world: int,
    kind: str,
    folder: str,
    swapped: list[int],
    averaged: list[int],
    behind: bool = False,
) -> None:
    """Take three steps, seal their state, and end.

    swapped: ranks that replace the weights before, `behind` the parameters or in them. averaged: ranks that change an
    extra after the seal, and seal the state again.
    """
    job = Job(kind, folder)
    job.session.resume()
    for number in range(1, 4):
        step(job.model, job.optimizer, number)
    if rank in swapped:
        put(job.model, 0.5, behind=behind)
    job.session.flush()
    if rank in averaged:
        job.average["norm"] += 1
        job.session.checkpoint(full=True)  # a flush would not read the extras again
    drained([job.session])
    job.session._opening.close(failed=True)  # as a signal ends it


def resumed(rank: int, world: int, kind: str, folder: str) -> dict[str, Any]:
    """Resume, and return the result."""
    job = Job(kind, folder)
    with job.session as session:
        found = session.resume()
    return {"step": found.step, "consistent": found.consistent, "reasons": list(found.reasons)}


def diverged(rank: int, world: int, folder: str, ranks: list[int]) -> list[str]:
    """Take eight steps; these ranks change their replicas after the second. Return the kinds of caveats."""
    job = Job("ddp", folder)
    with job.session as session:
        session.resume()
        for number in range(1, 9):
            step(job.model, job.optimizer, number)
            if number == 2 and rank in ranks:
                put(job.model, 0.5, behind=False)
        return [caveat.kind for caveat in session.caveats]


def regrouped(rank: int, world: int, folder: str, ranks: list[int]) -> dict[str, Any]:
    """Take eight steps; these ranks add a param_group after the second."""
    job = Job("ddp", folder)
    began = time.monotonic()
    with job.session as session:
        session.resume()
        for number in range(1, 9):
            step(job.model, job.optimizer, number)
            if number == 2 and rank in ranks:
                job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return {"seconds": time.monotonic() - began, "error": session.stats.last_error}
