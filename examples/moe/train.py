"""Train a mixture of experts on the source of Python's standard library: each rank has its experts, scarctl saves all.

torchrun --nproc-per-node 4 --max-restarts 1 examples/moe/train.py --store run

Kill any rank with -9: torchrun starts all of them again, and they continue where the survivors were.
`python examples/lost_rank.py moe --kill` does that and counts what it cost.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from model import Mixture
from ranks import batch, begin, load, log, log_resumed, parser
from torch import distributed as dist

import scarctl

LENGTH, BATCH = 16, 128


def main() -> None:
    """Train, or continue, until `--steps` are done."""
    arguments = parser(__doc__, steps=100).parse_args()
    rank, world = begin(), dist.get_world_size()
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
        log_resumed(resumed)
        for step in range(resumed.step + 1, arguments.steps + 1):
            pieces = batch(text, step, rank, BATCH, LENGTH + 1)
            inputs, targets = pieces[:, :-1], pieces[:, -1]
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
    """Average gradients over all ranks' batches. An expert has the sum: its input came from all ranks."""
    for parameter in model.dense.parameters():
        dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad /= world


if __name__ == "__main__":
    main()
