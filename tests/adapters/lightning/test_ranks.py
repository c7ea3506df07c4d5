"""Fits of two processes, under torchrun and under Lightning's own launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import ROOT, environment

JOB = ["-m", "tests.adapters.lightning.rank_job"]
TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
_LAUNCHERS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def run(folder: Path, launcher: list[str], **settings: Any) -> list[dict[str, Any]]:
    """Two ranks of the job; what came of each."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *launcher, *JOB, json.dumps({**settings, "result": str(folder)})],
        cwd=ROOT,
        env={k: v for k, v in environment(0, 2, 0).items() if k not in _LAUNCHERS_OWN},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ddp_goes_on_exactly_after_an_exception(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", [], strategy="ddp", store="")
    again = run(
        tmp_path / "again", TORCHRUN, strategy="ddp", store=str(tmp_path / "store"), die=["batch_end", 1, 0]
    )
    for rank in range(2):
        assert {**again[rank], "seen": 0, "resumed": 0} == {**whole[rank], "seen": 0, "resumed": 0}
        assert again[rank]["seen"] == whole[rank]["seen"][4:]
        assert again[rank]["resumed"]["step"] == 4
        assert again[rank]["resumed"]["exact"]


@pytest.mark.long
def test_fsdp2_goes_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    ranks = run(
        tmp_path / "job",
        TORCHRUN,
        strategy="fsdp2",
        store=str(tmp_path / "store"),
        die=["train", 1, 1],
        how="kill",
    )
    for rank in ranks:
        resumed = rank["resumed"]
        assert 0 < resumed["step"] <= 4
        assert rank["step"] == 9
        assert rank["epoch"] == 3
        assert len(rank["seen"]) == 9 - resumed["step"]
        assert rank["digest"] == ranks[0]["digest"]
