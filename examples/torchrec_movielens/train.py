"""Train on MovieLens with TorchRec and scarctl: tables on several ranks, which change in the backward pass.

torchrun --nproc-per-node 2 --max-restarts 1 examples/torchrec_movielens/train.py --store run --data ml-latest-small

Kill any rank with -9: torchrun starts all of them again, and only the tables of the killed one go back.
`python examples/lost_rank.py torchrec_movielens --ranks 2 --kill` does that and counts what it cost.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torchrec
from data import load
from model import Recommender
from ranks import begin, log, log_resumed, parser
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import scarctl
from scarctl.checkpoint.distance import curvature

BATCH = 256


def main() -> None:
    """Train, or continue, until `--steps` are done."""
    options = parser(__doc__, steps=80)
    options.add_argument(
        "--data", type=Path, default=Path("../shared/data/movielens-small"), help="default: %(default)s"
    )
    arguments = options.parse_args()
    rank = begin()
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
        # A row's changes count by how often it is used. docs/torchrec.md says when rows of their own pay.
        partitioning=scarctl.Partitioning(rows={"tables.*": 1}),
        selection=scarctl.Selection(policy="priority", norm=curvature),
        settings=scarctl.Settings(arena_dir=arguments.arena and f"{arguments.arena}/{rank}"),
        fraction=1 / 8,
        interval=arguments.interval,
    )
    with session:
        resumed = session.resume()
        log_resumed(resumed)
        for step in range(resumed.step + 1, arguments.steps + 1):
            features, stars = ratings.batch(step, rank, BATCH)
            loss = torch.nn.functional.mse_loss(model(features), stars)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
