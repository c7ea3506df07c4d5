"""Train the transformer of fsdp_transformer with DeepSpeed's engine and scarctl: ZeRO on several ranks.

torchrun --nproc-per-node 2 --max-restarts 1 examples/deepspeed_transformer/train.py --store run --stage 3

Kill any rank with -9: torchrun starts all of them again, and they continue where the survivors were.
`python examples/lost_rank.py deepspeed_transformer --ranks 2 --kill` does that and counts what it cost.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the import: it looks for one
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "fsdp_transformer"))

import deepspeed
import torch
from model import Transformer
from ranks import batch, begin, load, log, log_resumed, parser
from torch import distributed as dist

import scarctl

LENGTH, BATCH = 64, 4


def main() -> None:
    """Train, or continue, until `--steps` are done."""
    options = parser(__doc__, steps=40)
    options.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="default: %(default)s")
    arguments = options.parse_args()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Else the first process group compiles a kernel for minutes, which training never calls.
    deepspeed.ops.__compatible_ops__ = {}
    rank = begin()
    torch.manual_seed(0)
    text, model = load(), Transformer(LENGTH)
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
    with session:
        resumed = session.resume()
        log_resumed(resumed)
        for step in range(resumed.step + 1, arguments.steps + 1):
            pieces = batch(text, step, rank, BATCH, LENGTH + 1)
            inputs, targets = pieces[:, :-1], pieces[:, 1:]
            loss = torch.nn.functional.cross_entropy(engine(inputs).float(), targets.flatten())
            engine.backward(loss)
            engine.step()
            log.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
