"""Provide small recommenders sharded by TorchRec, and the values of their tables and optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = (40, 30, 25)
FUSED = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise": torchrec.optim.RowWiseAdagrad}
"""Optimizers with which FBGEMM trains on a CPU."""


class Recommender(nn.Module):
    """A model with three tables, one with two features, and a small dense part. width: 3 for tables of 8 columns."""

    def __init__(self, width: int, *, dense: bool = True) -> None:
        super().__init__()
        names = (["a"], ["b"], ["c", "d"])
        self.tables = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t{i}", embedding_dim=4 * (width - 1), num_embeddings=rows, feature_names=features
                )
                for i, (rows, features) in enumerate(zip(ROWS, names, strict=True))
            ],
        )
        self.drop = nn.Dropout(0.25)
        self.over = nn.Linear(16 * (width - 1), width) if dense else nn.Identity()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.over(self.drop(self.tables(features).values()))
        return found


def plan_of(model: Recommender, kind: str) -> ShardingPlan:
    """Return a plan for this world: "table", "row", "column", "copies", or "mixed" with one table of each."""
    world = dist.get_world_size()
    last = world - 1
    by_table = [table_wise(rank=0), table_wise(rank=last), table_wise(rank=0)]
    by_column = column_wise(ranks=[0, last] if last else [0])
    kinds = {
        "table": by_table,
        "swapped": [table_wise(rank=last), table_wise(rank=0), table_wise(rank=last)],
        "row": [row_wise()] * 3,
        "column": [by_column] * 3,
        "copies": [by_table[0], data_parallel(), by_table[2]],
        "mixed": [by_table[1], row_wise(), by_column],
        "dense": [table_wise(rank=0, compute_kernel="dense"), row_wise(compute_kernel="dense"), by_table[2]],
    }
    plan = construct_module_sharding_plan(
        model.tables,
        {f"t{i}": way for i, way in enumerate(kinds[kind])},
        local_size=world,
        world_size=world,
        device_type="cpu",
        sharder=EmbeddingBagCollectionSharder(),
    )
    return ShardingPlan({"tables": plan})


def build(
    kind: str, fused: str = "adagrad", *, width: int = 3, dense: bool = True
) -> tuple[DistributedModelParallel, Any]:
    """Return a model with the same values under every plan, and the optimizer as TorchRec's examples make it."""
    torch.manual_seed(0)
    plain = Recommender(width, dense=dense)
    initial = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    apply_optimizer_in_backward(FUSED[fused], plain.tables.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(
        plain,
        device=torch.device("cpu"),
        plan=plan_of(plain, kind),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not hasattr(tensor, "local_shards"):
                tensor.copy_(initial[name])
                continue
            for shard in tensor.local_shards():
                first, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                box = tuple(slice(a, a + n) for a, n in zip(first, size, strict=True))
                shard.tensor.copy_(initial[name][box])
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    parts = [model.fused_optimizer]
    if parameters:
        parts.append(KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adam(given, lr=0.01)))
    return model, CombinedOptimizer(parts)


def batch(seed: int, size: int = 4) -> KeyedJaggedTensor:
    """Return bags of ids for the four features, which depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (4 * size,), generator=generator)
    limits = torch.tensor([ROWS[0], ROWS[1], ROWS[2], ROWS[2]]).repeat_interleave(size)
    limits = limits.repeat_interleave(lengths)
    values = (torch.rand(len(limits), generator=generator) * limits).long()
    return KeyedJaggedTensor(keys=["a", "b", "c", "d"], values=values, lengths=lengths)


def local_parts(model: DistributedModelParallel, optimizer: Any) -> list[tuple[str, Any]]:
    """Return names and tensors of a model and its optimizer from TorchRec's state dicts, without the adapter."""
    named: list[tuple[str, Any]] = [*model.state_dict().items()]
    for parameter, state in optimizer.state_dict()["state"].items():
        named += [(f"{parameter}/{key.split('.')[-1]}", value) for key, value in state.items()]
    return named


def local_values(model: DistributedModelParallel, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return every tensor of this rank except step counts; parts of tables have their offsets in the name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in local_parts(model, optimizer):
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                found[f"{name}{shard.metadata.shard_offsets}"] = shard.tensor
        elif not name.endswith("/step"):
            found[name] = value
    return found
