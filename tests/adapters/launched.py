"""Run two ranks of a program under torchrun; one of them is killed, and both are started again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.launch import ROOT, environment, free_port


def torchrun(module: str, folder: Path, arena_dir: Path, *, kill_at: int) -> list[dict[str, Any]]:
    """Return what each rank has saved at its end."""
    given = {"out": str(folder), "store": str(folder / "store"), "arena": str(arena_dir), "kill_at": kill_at}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    set_by_it = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in environment(0, 1, free_port()).items() if name not in set_by_it}
    done = subprocess.run(
        [*command, "-m", module, json.dumps(given)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def check_ranks(found: list[dict[str, Any]], *, killed_at: int) -> None:
    """Check that both ranks continued from one sealed state, and ended bit for bit like a run without scarctl."""
    assert found[0]["resumed"] == found[1]["resumed"]
    step, exact = found[0]["resumed"]
    assert 1 <= step <= killed_at
    assert exact
    for rank in found:
        other = [name for name, value in rank["whole"].items() if not torch.equal(value, rank["state"][name])]
        assert other == []
