"""Refuse models and optimizers that cannot be checkpointed, and find states of communication hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from scarctl.errors import UsageError
from scarctl_adapters.torch.sharding import is_dtensor, local_part, params_of


def check_trained(model: Any, optimizers: Sequence[Any], *, knows_tables: bool = False) -> None:
    """Raise UsageError unless `model` is a module with its tensors in memory, trained by `optimizers`.

    knows_tables: whether the adapter saves tables that TorchRec has sharded.
    """
    if not isinstance(model, nn.Module):
        held = (
            model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else ()
        )
        hint = 'pass several models as one: torch.nn.ModuleDict({"generator": generator, "critic": critic})'
        if not any(isinstance(one, nn.Module) for one in held):
            hint = "pass the model itself, not its state_dict() or parameters"
        raise UsageError(f"model is of type {type(model).__name__}, not a torch.nn.Module", hint=hint)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise UsageError(
                f"{type(optimizer).__name__} has no step hooks: its constructor does not call that of Optimizer",
                hint="attach the optimizer that it wraps, or pass hooks='off' and call session.step()",
            )
    for name, tensor in _tensors(model, optimizers):
        _check_tensor(name, tensor)
        if not knows_tables:
            _check_not_sharded(name, tensor)
    _check_common(model, optimizers)


def _tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
    for number, optimizer in enumerate(optimizers):
        yield from ((f"optimizer{number}.param{j}", p) for j, p in enumerate(params_of(optimizer)))


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise UsageError(
            f"{name} has no shape yet: a lazy module gets it from its first input",
            hint="run one forward pass before attach",
        )
    if is_dtensor(tensor):
        return
    if is_traceable_wrapper_subclass(tensor) or tensor.is_nested:
        raise UsageError(
            f"{name} is a {type(tensor).__name__}, whose elements are not single values in memory",
            hint="checkpoint the model before it is converted, or convert it back",
        )
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{name} has the layout {tensor.layout}",
            hint="make it dense, or register a buffer with persistent=False and rebuild it",
        )
    if tensor.device.type == "meta":
        raise UsageError(f"{name} is on the meta device and has no values", hint="call to_empty() first")


def _check_not_sharded(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError for a table of TorchRec: each rank has a different part, and the backward pass trains it."""
    kinds = [type(tensor), *map(type, getattr(tensor, "_in_backward_optimizers", ()))]
    if any(kind.__module__.startswith("torchrec.") for kind in kinds):
        raise UsageError(
            f"{name} is a part of a table that TorchRec has sharded, without a DistributedModelParallel around it",
            hint="wrap the model in torchrec.distributed.DistributedModelParallel, and attach that",
        )


def _check_common(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    mine = {id(p): local_part(p).data_ptr() for p in model.parameters() if p.requires_grad}
    theirs = [p for optimizer in optimizers for p in params_of(optimizer)]
    memory = set(mine.values()) - {0}
    if mine and theirs and not any(id(p) in mine or local_part(p).data_ptr() in memory for p in theirs):
        raise UsageError(
            "no optimizer has a parameter of this model",
            hint="make the optimizer from model.parameters(), after the model is wrapped or moved",
        )


def unsaved_hooks(model: nn.Module, saved: Iterable[Any]) -> list[str]:
    """Return the types of communication hooks' states that are not in `saved`, and may let ranks differ.

    A state with a true `settled` has nothing to save.
    """
    if not dist.is_available():
        return []
    models = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    states = [state for ddp in models for _, state in getattr(ddp, "_comm_hooks", ())]
    given = set(map(id, saved))
    states = [s for s in states if not (s is None or isinstance(s, dist.ProcessGroup) or id(s) in given)]
    return sorted({type(s).__name__ for s in states if not getattr(s, "settled", False)})
