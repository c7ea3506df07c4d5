"""A mixture of experts on the source of Python's standard library: each rank has its experts, scarctl saves all.

torchrun --nproc-per-node 4 --max-restarts 1 examples/moe/train.py --store run

Kill any rank with -9: torchrun starts all of them again, and they go on where the survivors were.
`python examples/lost_rank.py moe --kill` does that and counts what it cost.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import sysconfig
from pathlib import Path

import torch
from model import Mixture
from torch import distributed as dist

import scarctl

LENGTH, BATCH = 16, 128
log = logging.getLogger("train")


def main() -> None:
    """Train, or go on training, until `--steps` are done."""
    arguments = _parse()
    logging.basicConfig(
        stream=sys.stdout, level="INFO", format="%(created).4f %(process)d %(name)s %(message)s"
    )
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text, model = load(), Mixture(LENGTH, rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=arguments.steps)
    log.info("ready")

    session = scarctl.attach(
        model,
        optimizer,
        schedulers=schedule,
        ranks=scarctl.Ranks(replicated=["dense.*"]),  # the same on all ranks; each rank's experts are its own
        store=arguments.store,
        settings=scarctl.Settings(arena_dir=arguments.arena and f"{arguments.arena}/{rank}"),
        fraction=1 / 8,
        interval=arguments.interval,
    )
    with session:
        resumed = session.resume()
        found = resumed.report and resumed.report.to_json()
        log.info("resumed %s", json.dumps({"step": resumed.step, "ranks": resumed.ranks, "report": found}))
        for step in range(resumed.step + 1, arguments.steps + 1):
            inputs, targets = batch(text, step, rank)
            logits, work = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits, targets)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
            schedule.step()
            log.info("step %d loss %.4f work %s", step, loss.item(), json.dumps(work))
    dist.destroy_process_group()


def average_gradients(model: Mixture, world: int) -> None:
    """The mean over all ranks' batches. An expert has got the sum: what it read came from everywhere."""
    for parameter in model.dense.parameters():
        dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad /= world


def load() -> torch.Tensor:
    """A megabyte of Python: uint8 of shape (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)[: 1 << 20]), dtype=torch.uint8
    )


def batch(text: torch.Tensor, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, int64 of shape (BATCH, LENGTH), and the next ones, (BATCH,): the same ones for a step in every run."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
    found = text[starts + torch.arange(LENGTH + 1)].long()
    return found[:, :-1], found[:, -1]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--interval", type=int, default=2, help="steps between two checkpoints of 1/8 each")
    parser.add_argument(
        "--arena", type=Path, help="folder for the ranks' memory, each of its own (default: shared)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
