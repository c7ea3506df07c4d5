"""Test fits of two processes, under torchrun and under Lightning's own launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import of_agent, torchrun
from tests.support import forkserver

JOB = "tests.adapters.lightning.rank_job"
LIGHTNING = (
    "torch._dynamo",
    "torch.distributed.run",
    "lightning.pytorch",
    "scarctl_adapters.lightning.callback",
)
"""Modules that the ranks have imported when they start, except for the rank that Lightning starts."""


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def run(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Run two ranks of the job under torchrun, and return the results of each."""
    folder.mkdir()
    settings["result"] = str(folder)
    # Shown when a test fails.
    sys.stderr.write(torchrun(JOB, json.dumps(settings), world=2, timeout=110, imports=LIGHTNING))
    return read(folder)


def run_alone(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Do the same, but Lightning starts the second rank."""
    folder.mkdir()
    command = ["-m", JOB, json.dumps({**settings, "result": str(folder)})]
    done = forkserver.run(command, env=of_agent(), timeout=110, imports=LIGHTNING)
    assert done.returncode == 0, done.stderr[-6000:]
    return read(folder)


@pytest.mark.parametrize("how", [pytest.param("", marks=pytest.mark.long), "held"])
@pytest.mark.long
def test_ddp_goes_on_exactly_after_an_exception(tmp_path: Path, how: str) -> None:
    whole = run_alone(tmp_path / "whole", strategy="ddp", store="")
    again = run(
        tmp_path / "again", strategy="ddp", store=str(tmp_path / "store"), die=["batch_end", 1, 0], how=how
    )
    for rank in range(2):
        assert again[rank]["resumed"]["step"] == 4
        assert again[rank]["resumed"]["consistent"], again[rank]["resumed"]
        assert {**again[rank], "seen": 0, "resumed": 0} == {**whole[rank], "seen": 0, "resumed": 0}
        assert again[rank]["seen"] == whole[rank]["seen"][4:]


@pytest.mark.long
def test_fsdp2_goes_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    ranks = run(
        tmp_path / "job", strategy="fsdp2", store=str(tmp_path / "store"), die=["train", 1, 1], how="kill"
    )
    for rank in ranks:
        resumed = rank["resumed"]
        assert 0 < resumed["step"] <= 4
        assert rank["step"] == 9
        assert rank["epoch"] == 3
        assert len(rank["seen"]) == 9 - resumed["step"]
        assert rank["digest"] == ranks[0]["digest"]
