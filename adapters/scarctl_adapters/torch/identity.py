"""Detect whether a model's and its optimizers' tensors are still the same objects in the same memory.

Collecting all groups anew takes longer than the rest of a checkpoint in the training thread. This check takes a
fraction of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller

import torch
from torch import nn
from torch.optim import Optimizer

from scarctl_adapters.torch.homes import homes_of
from scarctl_adapters.torch.slots import NEVER_SLOTS

_PLAIN = {torch.Tensor, nn.Parameter}


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one moment. Equal to those of another moment if views of them are still valid."""

    _facts: list[object]
    _kept: dict[int, torch.Tensor] = field(compare=False)
    """By id. Keeps the tensors alive, so that no other object gets their ids."""


def tensors_now(model: nn.Module, optimizers: Sequence[Optimizer]) -> Tensors | None:
    """Return the current parameters, buffers with their modules, and slots.

    None if a tensor is of a subclass, such as DTensor, or sparse: its parts may change while the object stays. None if
    a module overrides named_parameters or named_buffers.
    """
    if not _is_usual(model.named_parameters, nn.Module.named_parameters) or not all(
        _is_usual(module.named_buffers, nn.Module.named_buffers) for module in model.modules()
    ):
        return None
    places: list[object] = []
    kept: dict[int, torch.Tensor] = {}
    for where, tensor in _tensors_of(model, optimizers):
        number = id(tensor)
        places += where, number
        kept[number] = tensor
    tensors = list(kept.values())
    if not set(map(type, tensors)) <= _PLAIN or set(map(_LAYOUT, tensors)) - {torch.strided}:
        return None
    # One attribute of all tensors after the other: a loop over thousands of them would take milliseconds.
    return Tensors([places, *(list(map(fact, tensors)) for fact in _FACTS)], kept)


def _is_usual(method: Callable[..., object], usual: Callable[..., object]) -> bool:
    return getattr(method, "__func__", None) is usual


_LAYOUT = attrgetter("layout")


def _storage(tensor: torch.Tensor) -> int:
    # An emptied storage lives on, and its address may belong to another one by now.
    return int(tensor.untyped_storage()._cdata)


_FACTS: Sequence[Callable[[torch.Tensor], object]] = (
    attrgetter("_cdata", "shape", "dtype", "requires_grad"),
    _storage,
    methodcaller("data_ptr"),
    methodcaller("stride"),
    methodcaller("is_conj"),
    methodcaller("is_neg"),
)
"""Facts that change as soon as views of a tensor, or its version counter, are no longer valid."""


def _tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[object, torch.Tensor]]:
    """Yield every tensor with its location, which alone is not unique."""
    for name, module in model.named_modules():
        hidden = module._non_persistent_buffers_set
        yield from ((name + key, p) for key, p in module._parameters.items() if p is not None)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in hidden:
                # Buffers are read from this very module later.
                yield (name + key, id(module)), buffer
    for i, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            yield from (((i, number), p) for p in group["params"])
    for i, home in enumerate(home for o in optimizers for home in homes_of(o, optimizers)):
        # With ZeRO this is the inner optimizer, whose parameters have their slots on this rank.
        for number, group in enumerate(home.optimizer.param_groups):
            yield from (((i, number), p) for p in group["params"])
        for parameter, state in home.optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                yield (i, bool(state)), parameter
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and key not in NEVER_SLOTS:
                        yield (i, key), value
