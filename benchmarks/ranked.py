"""Start ranks under torchrun, and build their FSDP2 state, for the benchmarks of several ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import arenas, scratch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import scarctl

WIDTH = 1024
SLOTS = ("exp_avg", "exp_avg_sq")
STATE_BYTES = 12
"""Per parameter: float32, and two moments of AdamW."""


def torchrun(script: str, options: Sequence[str], ranks: int, restarts: int = 0) -> None:
    """Run the script under torchrun, with its output here. Exits when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", script, *options]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Otherwise ranks that torchrun restarts read addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    # An installed package has its byte code; a checkout has it after the first start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit("the ranks failed")


def run(
    options: argparse.ArgumentParser,
    script: str,
    worker: Callable[[argparse.Namespace], None],
    *,
    restarts: Callable[[argparse.Namespace], int] = lambda _: 0,
    report: Callable[[Path, argparse.Namespace], None] = lambda *_: None,
) -> None:
    """Parse the options, run `worker` in `--ranks` processes of this script, and then `report`, given their folder."""
    options.add_argument("--work-folder", help="given to the ranks")
    options.add_argument("--arena-dir", help="given to the ranks")
    args = options.parse_args()
    if args.work_folder:
        torch.set_num_threads(1)
        worker(args)
        return
    with scratch(args.folder) as folder, arenas(folder) as arena_dir:
        given = [*sys.argv[1:], "--work-folder", str(folder), "--arena-dir", arena_dir]
        torchrun(here(script), given, args.ranks, restarts(args))
        report(folder, args)


def build(mb: float) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model of linear layers and its optimizer, of `mb` MB on every rank after the first step, by FSDP2.

    The gradients are made once: AdamW moves every value with the same one at every step.
    """
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    layers = max(1, round(mb * 1e6 * ranks / STATE_BYTES / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def make_slots(optimizer: torch.optim.AdamW) -> None:
    """Slots of zeros, as a load needs them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for slot in SLOTS:
                optimizer.state[parameter][slot] = torch.zeros_like(parameter.detach())


def tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> Iterator[tuple[str, Any]]:
    """Yield every DTensor of the state by a flat name."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for slot in SLOTS:
            yield f"{name}/{slot}", optimizer.state[parameter][slot]


def wait_durable(session: scarctl.Session, timeout: float = 300.0) -> None:
    """Wait until the store has all that this rank has queued."""
    end = time.perf_counter() + timeout
    while session.lag:
        if time.perf_counter() > end:
            raise TimeoutError(f"not durable after {timeout} s: {session.stats}")
        time.sleep(0.02)


def latest(value: float) -> float:
    """Return the largest of all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def total(value: float) -> float:
    """Return the sum over all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found)


def here(file: str) -> str:
    """Return a script's path, for `torchrun`."""
    return str(Path(file).resolve())
