"""Test fits of two processes under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import torchrun

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


@pytest.mark.long
def test_fsdp2_goes_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    ranks = run(tmp_path / "job", store=str(tmp_path / "store"), die=["train", 1, 1])
    for rank in ranks:
        resumed = rank["resumed"]
        assert 0 < resumed["step"] <= 4
        assert rank["step"] == 9
        assert rank["epoch"] == 3
        assert len(rank["seen"]) == 9 - resumed["step"]
        assert rank["digest"] == ranks[0]["digest"]
