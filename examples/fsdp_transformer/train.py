"""Train a transformer on the source of Python's standard library: FSDP2 on several ranks, with scarctl.

torchrun --nproc-per-node 4 --max-restarts 1 examples/fsdp_transformer/train.py --store run

Kill any rank with -9: torchrun starts all of them again, and they continue where the survivors were.
`python examples/lost_rank.py fsdp_transformer --kill` does that and counts what it cost.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from model import Transformer
from ranks import batch, begin, load, log, log_resumed, parser
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import scarctl

LENGTH, BATCH = 64, 4


def main() -> None:
    """Train, or continue, until `--steps` are done."""
    arguments = parser(__doc__, steps=60).parse_args()
    rank = begin()
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
        log_resumed(resumed)
        for step in range(resumed.step + 1, arguments.steps + 1):
            pieces = batch(text, step, rank, BATCH, LENGTH + 1)
            inputs, targets = pieces[:, :-1], pieces[:, 1:]
            loss = torch.nn.functional.cross_entropy(model(inputs), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            log.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
