"""Build TorchRec's own DLRM, and a trace whose ids follow Zipf's law, for the benchmarks of embedding tables.

Eight tables of 16 columns, each looked up by one feature, with row-wise Adagrad in the backward pass; 13 dense
features, and small dense layers with Adam. Some ids are popular, and spread over their table as by a hash. Labels are
drawn from a logistic model with a number for each row, so that training learns what the rows are for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

WIDTH, DENSE = 16, 13
ROW_BYTES = 4 * (WIDTH + 1)
"""A row, and its number of row-wise Adagrad."""
SHARES = (0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005)
"""Shares of the rows that the tables have."""
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Bags of ids and dense features, and whether each was clicked."""

    features: Any
    dense: torch.Tensor
    labels: torch.Tensor
    rows: Ids
    """Rows that are looked up, numbered over all tables, as often as they are looked up."""


class Training:
    """A model and its optimizers. The same seed is the same run, if torch uses one thread."""

    def __init__(self, rows: int, *, bags: int, ids: int, seed: int = 0, rate: float = 0.05) -> None:
        """rows: of all tables. bags: examples in a batch. ids: of each feature of an example."""
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel, get_module
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.types import ShardingPlan
        from torchrec.models.dlrm import DLRM
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        from scarctl_adapters.torchrec.tables import kernels_of

        self.sizes = [max(2, int(share * rows)) for share in SHARES]
        self.first = np.cumsum([0, *self.sizes])
        """First row of each table, and then the number of rows."""
        self.rows = int(self.first[-1])
        self.bags, self.ids, self._seed = bags, ids, seed
        self.seconds, self.taken = 0.0, 0
        """Spent in `steps`, and how many there were."""
        self._iteration = 0
        torch.manual_seed(seed)
        tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t{k}", embedding_dim=WIDTH, num_embeddings=size, feature_names=[f"f{k}"]
                )
                for k, size in enumerate(self.sizes)
            ],
        )
        plain = DLRM(tables, DENSE, dense_arch_layer_sizes=[64, WIDTH], over_arch_layer_sizes=[64, 1])
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": rate})
        # Small tables would get another optimizer than the fused one if the planner chose.
        ways = {f"t{k}": table_wise(rank=0, compute_kernel="fused") for k in range(len(self.sizes))}
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            tables, ways, local_size=1, world_size=1, device_type="cpu", sharder=sharder
        )
        self.model = DistributedModelParallel(
            plain,
            device=torch.device("cpu"),
            plan=ShardingPlan({"sparse_arch.embedding_bag_collection": plan}),
            sharders=[sharder],
        )
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.parameters = list(parameters.values())
        self.dense = torch.optim.Adam(self.parameters, lr=1e-3)
        wrapped = KeyedOptimizerWrapper(parameters, lambda _: self.dense)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, wrapped])
        found = {t.name.split(".")[-2]: t for k in kernels_of(get_module(self.model)) for t in k.tables}
        self.tables = [(found[f"t{k}"].weight, found[f"t{k}"].slots["sum"]) for k in range(len(self.sizes))]
        """Live weights of shape (rows, WIDTH) and Adagrad's sums of shape (rows,), by table."""

    def batch(self, number: int, bags: int | None = None) -> Batch:
        """Return the batch of an iteration, which its number determines."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        draw = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        bags = bags or self.bags
        of_tables = []
        for size in self.sizes:
            popular = torch.exp(torch.rand(bags * self.ids, generator=draw) * math.log(size)).long() - 1
            of_tables.append(popular * 2654435761 % size)
        dense = torch.randn(bags, DENSE, generator=draw)
        rows = torch.cat([ids + int(first) for ids, first in zip(of_tables, self.first, strict=False)])
        # A number between -1 and 1 for each row, as good as random, without a table of them.
        worth = torch.frac(torch.sin(rows.double() * 12.9898) * 43758.5453)
        logits = worth.view(len(self.sizes), bags, self.ids).sum((0, 2))
        logits = logits * (2.5 / math.sqrt(len(self.sizes) * self.ids)) + dense[:, 0]
        labels = torch.rand(bags, generator=draw) < torch.sigmoid(logits)
        features = KeyedJaggedTensor(
            keys=[f"f{k}" for k in range(len(self.sizes))],
            values=torch.cat(of_tables),
            lengths=torch.full((len(self.sizes) * bags,), self.ids),
        )
        return Batch(features, dense, labels.float(), rows.numpy())

    def step(self, batch: Batch) -> None:
        """Train on a batch: one iteration."""
        self.optimizer.zero_grad()
        self._loss(batch).backward()
        self.optimizer.step()

    def steps(self, count: int, note: Callable[[Ids], None] | None = None) -> None:
        """Train on the next batches, and time that. note: is called with each one's rows."""
        for _ in range(count):
            self._iteration += 1
            batch = self.batch(self._iteration)
            start = time.perf_counter()
            self.step(batch)
            if note is not None:
                note(batch.rows)
            self.seconds += time.perf_counter() - start
            self.taken += 1

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        """Return the loss of a batch, without training on it."""
        return float(self._loss(batch))

    def _loss(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch.dense, batch.features).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels)

    def take(self, rows: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the weights and sums of some rows, given in ascending order."""
        parts = np.split(rows, np.searchsorted(rows, self.first[1:-1]))
        chosen = [torch.from_numpy(part - first) for part, first in zip(parts, self.first, strict=False)]
        pairs = [(w[ids], s[ids]) for (w, s), ids in zip(self.tables, chosen, strict=True)]
        return torch.cat([w for w, _ in pairs]), torch.cat([s for _, s in pairs])

    def put(self, weights: torch.Tensor, sums: torch.Tensor) -> None:
        """Set the weights and sums of all rows."""
        for (w, s), first, stop in zip(self.tables, self.first, self.first[1:], strict=False):
            w.copy_(weights[first:stop])
            s.copy_(sums[first:stop])


def alone() -> None:
    """Make this process the only one of a job, as `DistributedModelParallel` needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
