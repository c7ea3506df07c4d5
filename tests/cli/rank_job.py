"""Run one rank of a job that trains until a file appears, for commands that inspect a running job."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

import scarctl
from tests.distributed.jobs import build, step


def until(rank: int, world: int, kind: str, folder: str, seconds: float) -> int:
    """Train until `folder/stop` exists, at most for so many seconds; return the last step."""
    model, optimizer = build(kind)
    Path(folder, "arena").mkdir(exist_ok=True)
    session = scarctl.attach(
        model,
        optimizer,
        store=f"{folder}/store",
        settings=scarctl.Settings(arena_dir=f"{folder}/arena", daemon=True),
        fraction=0.25,
        interval=5,
        partitioning=scarctl.Partitioning(partition_bytes=2048),
    )
    deadline = time.monotonic() + seconds
    with session:
        number = session.resume().step
        while True:
            number += 1
            step(model, optimizer, number)
            if number == 3 and rank == 0:
                Path(folder, "started").touch()
            # All of them stop after the same step.
            stop = torch.tensor([Path(folder, "stop").exists() or time.monotonic() > deadline])
            dist.broadcast(stop, 0)
            if stop.item():
                return number
            time.sleep(0.25)  # like real iterations: all ranks are to hear of a request within one


if __name__ == "__main__":
    dist.init_process_group("gloo")
    until(dist.get_rank(), dist.get_world_size(), sys.argv[1], sys.argv[2], float(sys.argv[3]))
    dist.barrier()
    dist.destroy_process_group()
