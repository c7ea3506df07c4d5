"""The transformer of fsdp_transformer under DeepSpeed's engine: ZeRO on several ranks, with scarctl beside it.

torchrun --nproc-per-node 2 --max-restarts 1 examples/deepspeed_transformer/train.py --store run --stage 3

Kill any rank with -9: torchrun starts all of them again, and they go on where the survivors were.
`python examples/lost_rank.py deepspeed_transformer --ranks 2 --kill` does that and counts what it cost.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the import: it looks for one
sys.path.append(str(Path(__file__).resolve().parents[1] / "fsdp_transformer"))

import deepspeed
import torch
from model import Transformer
from torch import distributed as dist

import scarctl

LENGTH, BATCH = 64, 4
log = logging.getLogger("train")


def main() -> None:
    """Train, or go on training, until `--steps` are done."""
    arguments = _parse()
    form = "%(created).4f %(process)d %(name)s %(message)s"
    logging.basicConfig(stream=sys.stdout, level="INFO", format=form, force=True)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Else the first process group compiles a kernel for minutes, which training never calls.
    deepspeed.ops.__compatible_ops__ = {}
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Transformer(LENGTH)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": arguments.stage},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    log.info("ready")

    session = scarctl.attach(
        engine,
        store=arguments.store,
        settings=scarctl.Settings(arena_dir=arguments.arena and f"{arguments.arena}/{rank}"),
        fraction=1 / 8,
        interval=arguments.interval,
    )
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    with session:
        resumed = session.resume()
        found = resumed.report and resumed.report.to_json()
        log.info("resumed %s", json.dumps({"step": resumed.step, "ranks": resumed.ranks, "report": found}))
        for step in range(resumed.step + 1, arguments.steps + 1):
            inputs, targets = batch(text, step, rank)
            loss = torch.nn.functional.cross_entropy(engine(inputs).float(), targets.flatten())
            engine.backward(loss)
            engine.step()
            log.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


def batch(text: torch.Tensor, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and those one further on, int64 of shape (BATCH, LENGTH): the same ones for a step in every run."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
    found = text[starts + torch.arange(LENGTH + 1)].long()
    return found[:, :-1], found[:, 1:]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=2, help="steps between two checkpoints of 1/8 each")
    parser.add_argument(
        "--arena", type=Path, help="folder for the ranks' memory, each of its own (default: shared)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
