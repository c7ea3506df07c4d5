"""Test state that changes between two steps: no rank calls a mix of two states exact."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from tests.distributed.jobs import build, step
from tests.distributed.launch import launch
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


FLUSHED, RESUMED = "tests.distributed.test_replaced:flushed", "tests.distributed.test_replaced:resumed"
DIVERGED, REGROUPED = "tests.distributed.test_replaced:diverged", "tests.distributed.test_replaced:regrouped"


@pytest.mark.parametrize(("averaged", "exact"), [([0, 1], True), ([1], False)])
@pytest.mark.long
def test_extras_that_change_without_a_step(tmp_path: Path, averaged: list[int], exact: bool) -> None:
    """If a rank has saved other extras since, its state no longer belongs to that of the others."""
    launch(FLUSHED, 2, str(tmp_path), averaged)
    found = launch(RESUMED, 2, "fsdp", str(tmp_path))
    assert [(one["step"], one["consistent"]) for one in found] == [(3, exact)] * 2
    for one in found:
        assert exact or "saved several times" in "; ".join(one["reasons"])


@pytest.mark.parametrize("ranks", [pytest.param([], marks=pytest.mark.long), [1]])
def test_replicas_that_diverge_are_said(tmp_path: Path, ranks: list[int]) -> None:
    found = launch(DIVERGED, 2, str(tmp_path), ranks)
    assert ["ranks-differ" in kinds for kinds in found] == [bool(ranks)] * 2
    again = launch(RESUMED, 2, "ddp", str(tmp_path))
    assert [one["consistent"] for one in again] == [not ranks] * 2
    for one in again:
        assert not ranks or any("ranks have different values" in reason for reason in one["reasons"])


@pytest.mark.long
def test_a_param_group_of_one_rank_alone_makes_no_rank_wait(tmp_path: Path) -> None:
    first, second = launch(REGROUPED, 2, str(tmp_path), [1])
    assert first["error"] == ""
    assert "Adam has other param_groups" in second["error"]
    assert max(first["seconds"], second["seconds"]) < 60
    found = launch(RESUMED, 2, "ddp", str(tmp_path))
    # The second rank could save nothing after the first step, so that is the newest state of one step.
    assert all((one["step"], one["consistent"]) == (1, True) for one in found), found
