"""Find this process's parts of a model's embedding tables, with the optimizer state that FBGEMM keeps for them.

TorchRec replaces an embedding collection by a sharded module. Its lookups are not registered submodules. Each lookup
has kernels, and a kernel has the parts of several tables in one flat tensor. A fused kernel trains its tables in the
backward pass. The parameters of a dense kernel have gradients, and an ordinary optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule

from scarctl.errors import UsageError
from scarctl.state.layout import Place

_TABLES = {ShardedEmbeddingBagCollection: "embedding_bags", ShardedEmbeddingCollection: "embeddings"}
"""The supported sharded modules, and their attribute with the tables."""
OPTIMIZERS = (
    *("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"),
    *("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB"),
)
"""Fused optimizers that change tables in the backward pass only, and whose state FBGEMM can name."""
_COUNTING = ("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB")
_PRECISIONS = ("FP32", "FP16", "BF16")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """This process's part of a table."""

    name: str
    """Name of the table's parameter in the model, with wrappers."""
    weight: torch.Tensor
    """A view of the kernel's memory, of shape (rows, columns)."""
    place: Place | None
    """Place in the whole table; None if the part is the whole table."""
    slots: dict[str, torch.Tensor]
    """State of the fused optimizer, of the weight's shape or of shape (rows,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """An FBGEMM module with the parts of some tables."""

    module: str
    """Name of the sharded module, with wrappers."""
    lookup: Any
    """The FBGEMM module."""
    settings: list[dict[str, Any]]
    """The param_groups of its fused optimizer; [] for a dense kernel."""
    tables: tuple[Table, ...]

    @property
    def fused(self) -> bool:
        """Whether it trains its tables in the backward pass."""
        return isinstance(self.lookup, SplitTableBatchedEmbeddingBagsCodegen)

    @property
    def counts(self) -> bool:
        """Whether its optimizer counts steps."""
        return self.lookup.optimizer.name in _COUNTING or bool(
            self.lookup._used_rowwise_adagrad_with_counter
            or self.lookup._used_rowwise_adagrad_with_global_weight_decay
        )


def kernels_of(model: nn.Module) -> list[Kernel]:
    """Return the kernels of this process, in the order of the model's modules.

    Raises UsageError, naming the module or table, for a kernel that cannot be saved.
    """
    found: list[Kernel] = []
    for name, module in model.named_modules():
        if not isinstance(module, ShardedModule):
            continue
        attribute = next((a for kind, a in _TABLES.items() if type(module) is kind), None)
        if attribute is None:
            raise UsageError(
                f"{name} is a {type(module).__name__}, whose tables cannot be saved yet",
                hint="use EmbeddingBagCollection or EmbeddingCollection",
            )
        found += _kernels(name, attribute, module)
    return found


def fused_optimizers(model: nn.Module) -> list[str]:
    """Return the names of the fused optimizers of all ranks' tables, sorted; the same on every rank."""
    return sorted(
        {
            config.fused_params.get("optimizer", EmbOptimType.EXACT_SGD).name
            for module in model.modules()
            if type(module) in _TABLES
            for sharding in _shardings(module)
            for configs in sharding._grouped_embedding_configs_per_rank
            for config in configs
            if config.compute_kernel is not EmbeddingComputeKernel.DENSE
        }
    )


def _shardings(module: Any) -> list[Any]:
    if isinstance(module, ShardedEmbeddingCollection):
        return list(module._sharding_type_to_sharding.values())
    return list(module._embedding_shardings)


def _kernels(name: str, attribute: str, module: Any) -> Iterator[Kernel]:
    seen: set[str] = set()
    for lookup in module._lookups:
        # For tables that all ranks hold, it is inside DistributedDataParallel.
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            configs = kernel.config.embedding_tables
            names = [".".join(filter(None, (name, attribute, config.name, "weight"))) for config in configs]
            inner = kernel.emb_module
            _check(names, inner)
            fused = isinstance(inner, SplitTableBatchedEmbeddingBagsCodegen)
            states = (inner.get_optimizer_state() if fused else None) or [{}] * len(configs)
            parts = zip(names, configs, inner.split_embedding_weights(), states, strict=True)
            tables = tuple(_table(*part) for part in parts)
            for table in tables:
                if table.name in seen:
                    raise UsageError(
                        f"this rank has several parts of {table.name}",
                        hint="place the columns of a table on different ranks: column_wise(ranks=[0, 1])",
                    )
                seen.add(table.name)
            settings = kernel.fused_optimizer.param_groups if fused else []
            yield Kernel(name, inner, settings, tables)


def _table(name: str, config: Any, weight: torch.Tensor, state: dict[str, torch.Tensor]) -> Table:
    slots = {key: value.detach() for key, value in state.items() if value.shape[:1] == weight.shape[:1]}
    whole, mine = (config.num_embeddings, config.embedding_dim), tuple(weight.shape)
    if mine == whole:
        return Table(name, weight.detach(), None, slots)
    rows, columns = config.local_metadata.shard_offsets
    if mine[1] != whole[1] and any(slot.dim() == 1 for slot in slots.values()):
        # A number per row and part belongs to these columns: they are a tensor of their own.
        name, whole, columns = f"{name}.columns{columns}-{columns + mine[1]}", (whole[0], mine[1]), 0
    place = Place(whole, (rows, columns)) if mine != whole else None
    return Table(name, weight.detach(), place, slots)


def _check(names: list[str], inner: nn.Module) -> None:
    """Raise UsageError unless the memory of the FBGEMM module has the newest values whenever no step runs."""
    which = ", ".join(names)
    if isinstance(inner, DenseTableBatchedEmbeddingBagsCodegen):
        return
    if not isinstance(inner, SplitTableBatchedEmbeddingBagsCodegen):
        raise UsageError(
            f"{which}: {type(inner).__name__} keeps tables where they cannot be saved yet",
            hint="use the compute kernel EmbeddingComputeKernel.FUSED",
        )
    if inner.lxu_cache_weights.numel():
        raise UsageError(
            f"{which}: the newest rows are in a cache, and the table itself has older ones",
            hint="use the compute kernel FUSED or FUSED_UVM, not FUSED_UVM_CACHING",
        )
    if inner.optimizer.name not in OPTIMIZERS:
        raise UsageError(
            f"{which}: the fused optimizer {inner.optimizer.name} cannot be saved yet",
            hint=f"use one of {', '.join(OPTIMIZERS)}",
        )
    if inner.weights_precision.name not in _PRECISIONS:
        raise UsageError(
            f"{which}: weights of {inner.weights_precision.name} cannot be saved yet",
            hint=f"use one of {', '.join(_PRECISIONS)}",
        )
