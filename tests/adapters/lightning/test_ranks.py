"""Fits of several processes, under torchrun and under Lightning's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import ROOT, free_port

JOB = "tests.adapters.lightning.rank_job"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]


def run(folder: Path, settings: dict[str, Any], *, restarts: int | None = None) -> subprocess.CompletedProcess[str]:
    """Two ranks of the job; restarts: how often torchrun starts them again. None: Lightning starts the second one."""
    folder.mkdir(exist_ok=True)
    launcher = (
        [*TORCHRUN, "--master-port", str(free_port()), "--max-restarts", str(restarts), "-m", JOB]
        if restarts is not None
        else ["-m", JOB]
    )
    return subprocess.run(
        [sys.executable, *launcher, json.dumps({**settings, "result": str(folder)})],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "MASTER_ADDR": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )


def results(folder: Path, process: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert process.returncode == 0, process.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.leaves_arena
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_go_on_exactly_after_an_exception(strategy: str, tmp_path: Path) -> None:
    whole = results(tmp_path / "whole", run(tmp_path / "whole", {"strategy": strategy, "store": ""}, restarts=0))
    settings = {"strategy": strategy, "store": str(tmp_path / "store"), "die": ["batch_end", 1, 0]}
    again = results(tmp_path / "again", run(tmp_path / "again", settings, restarts=1))
    for rank in range(2):
        assert {**again[rank], "seen": 0, "resumed": 0} == {**whole[rank], "seen": 0, "resumed": 0}
        assert again[rank]["seen"] == whole[rank]["seen"][4:]
        assert again[rank]["resumed"]["step"] == 4
        assert again[rank]["resumed"]["exact"]
