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


def flushed(rank: int, world: int, folder: str, averaged: list[int]) -> None:
    """Take three steps, seal their state, and end. averaged: ranks that change an extra after that, and seal again."""
    job = Job("fsdp", folder)
    job.session.resume()
    for number in range(1, 4):
        step(job.model, job.optimizer, number)
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
                for parameter in job.model.parameters():
                    parameter.data.mul_(0.5)  # torch does not count it
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
