"""MovieLens with TorchRec: embedding tables on several ranks, trained in the backward pass, with scarctl beside them.

torchrun --nproc-per-node 2 --max-restarts 1 examples/torchrec_movielens/train.py --store run --data ml-latest-small

Kill any rank with -9: torchrun starts all of them again, and only the tables of the killed one go back.
`python examples/lost_rank.py torchrec_movielens --ranks 2 --kill` does that and counts what it cost.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import torch
import torchrec
from data import load
from model import Recommender
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import scarctl

BATCH = 256
log = logging.getLogger("train")


def main() -> None:
    """Train, or go on training, until `--steps` are done."""
    arguments = _parse()
    form = "%(created).4f %(process)d %(name)s %(message)s"
    logging.basicConfig(
        stream=sys.stdout, level="INFO", format=form, force=True
    )  # TorchRec has done so before
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ratings = load(arguments.data)
    torch.manual_seed(0)
    model = Recommender(ratings.counts)
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.tables.parameters(), {"lr": 0.05})
    model = DistributedModelParallel(model, device=torch.device("cpu"))
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adam(given, lr=3e-3))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    log.info("ready")

    session = scarctl.attach(
        model,
        optimizer,
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
            features, stars = ratings.batch(step, rank, BATCH)
            loss = torch.nn.functional.mse_loss(model(features), stars)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/movielens-small"), help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--interval", type=int, default=2, help="steps between two checkpoints of 1/8 each")
    parser.add_argument(
        "--arena", type=Path, help="folder for the ranks' memory, each of its own (default: shared)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
