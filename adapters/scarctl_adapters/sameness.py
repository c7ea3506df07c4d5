"""Whether a model and its optimizers still have the tensors that they had, in the same memory.

To ask every tensor what it is takes longer than all else that a checkpoint does in the training thread. That none was
replaced is seen in a fraction of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from scarctl_adapters.homes import homes_of
from scarctl_adapters.slots import NEVER_SLOTS

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Tensors:
    """Which tensors there are. Equal to others as long as views of these are still views of those."""

    _facts: list[object]
    _kept: dict[int, torch.Tensor] = field(compare=False)
    """By id: as long as they are kept, no other object gets that id."""


def tensors_now(model: nn.Module, optimizers: Sequence[Optimizer]) -> Tensors | None:
    """Parameters, buffers and the modules that have them, and slots.

    None where a tensor is of a subclass, such as DTensor, or sparse: its parts may be others, and it the same. Also
    where a module tells in a way of its own what it has.
    """
    if not _is_usual(model.named_parameters, nn.Module.named_parameters) or not all(
        _is_usual(module.named_buffers, nn.Module.named_buffers) for module in model.modules()
    ):
        return None
    facts: list[object] = []
    kept: dict[int, torch.Tensor] = {}
    for where, tensor in _tensors_of(model, optimizers):
        number = id(tensor)
        facts += where, number
        if number not in kept:
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                return None
            kept[number] = tensor
            facts += _facts_of(tensor)
    return Tensors(facts, kept)


def _is_usual(method: Callable[..., object], usual: Callable[..., object]) -> bool:
    return getattr(method, "__func__", None) is usual


def _facts_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What changes as soon as a view of the tensor, or what torch counts of writes to it, is no longer its own."""
    return (
        tensor._cdata,
        # A storage that somebody has emptied lives on, and its address may be another one's by now.
        tensor.untyped_storage()._cdata,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.requires_grad,
    )


def _tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[object, torch.Tensor]]:
    """With what says where it is, which is not unique on its own."""
    for name, module in model.named_modules():
        hidden = module._non_persistent_buffers_set
        yield from ((name + key, p) for key, p in module._parameters.items() if p is not None)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in hidden:
                # Who asks for buffers later asks this very module.
                yield (name + key, id(module)), buffer
    for i, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            yield from (((i, number), p) for p in group["params"])
    for i, home in enumerate(home for o in optimizers for home in homes_of(o, optimizers)):
        # With ZeRO that is another one, of the parameters whose slots are here.
        for number, group in enumerate(home.optimizer.param_groups):
            yield from (((i, number), p) for p in group["params"])
        for parameter, state in home.optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                yield (i, bool(state)), parameter
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and key not in NEVER_SLOTS:
                        yield (i, key), value
