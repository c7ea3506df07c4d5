"""A transformer on the source of Python's standard library: FSDP2 on several ranks, with scarctl beside it.

torchrun --nproc-per-node 4 --max-restarts 1 examples/fsdp_transformer/train.py --store run

Kill any rank with -9: torchrun starts all of them again, and they go on where the survivors were.
`python examples/lost_rank.py fsdp_transformer --kill` does that and counts what it cost.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import sysconfig
from pathlib import Path

import torch
from model import Transformer
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import scarctl

LENGTH, BATCH = 64, 4
log = logging.getLogger("train")


def main() -> None:
    """Train, or go on training, until `--steps` are done."""
    arguments = _parse()
    logging.basicConfig(
        stream=sys.stdout, level="INFO", format="%(created).4f %(process)d %(name)s %(message)s"
    )
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    text, model = load(), Transformer(LENGTH)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=arguments.steps)
    log.info("ready")

    session = scarctl.attach(
        model,
        optimizer,
        schedulers=schedule,
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
            loss = torch.nn.functional.cross_entropy(model(inputs), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            log.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


def load() -> torch.Tensor:
    """A megabyte of Python: uint8 of shape (bytes,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)[: 1 << 20]), dtype=torch.uint8
    )


def batch(text: torch.Tensor, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and those one further on, int64 of shape (BATCH, LENGTH): the same ones for a step in every run."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
    found = text[starts + torch.arange(LENGTH + 1)].long()
    return found[:, :-1], found[:, 1:]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=2, help="steps between two checkpoints of 1/8 each")
    parser.add_argument(
        "--arena", type=Path, help="folder for the ranks' memory, each of its own (default: shared)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
