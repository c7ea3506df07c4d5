"""Detect whether a model's and its optimizers' tensors are still the same objects in the same memory.

Collecting all groups takes longer than the rest of a checkpoint in the training thread. Checking whether they are still
valid takes a fraction of that time, because every loop over all tensors runs in C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller

import torch
from torch import nn
from torch.optim import Optimizer

from scarctl_adapters.torch.homes import homes_of
from scarctl_adapters.torch.sharding import dtensor_class
from scarctl_adapters.torch.slots import NEVER_SLOTS

_PLAIN = {torch.Tensor, nn.Parameter}
_DICTS = attrgetter("_modules", "_parameters")
_VALUES = methodcaller("values")
_REQUIRES_GRAD = attrgetter("requires_grad")
_FACTS = attrgetter("_cdata", "dtype", "requires_grad")
"""Properties that may change although the object stays. Another `_cdata` has another version counter."""
_LAZY = (torch.Tensor.is_conj, torch.Tensor.is_neg)
_PART, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")
"""A DTensor's tensor in this process, and its mesh and placements."""


class Tensors:
    """The tensors of one moment: parameters, buffers with their modules, and slots."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._modules = list(model.modules())
        self._structure, self._objects = self._now()
        tensors = {id(each): each for each in self._objects if isinstance(each, torch.Tensor)}
        sharded = dtensor_class()
        self._sharded = [each for each in tensors.values() if type(each) is sharded]
        self._parts, self._specs = list(map(_PART, self._sharded)), list(map(_SPEC, self._sharded))
        plain = [each for each in tensors.values() if type(each) is not sharded]
        self.tensors = list({id(each): each for each in (*plain, *self._parts)}.values())
        """The distinct tensors; of a DTensor its part in this process."""
        self._complex = [tensor for tensor in self.tensors if tensor.is_complex()]
        self._views: list[torch.Tensor] = []
        """A view of each tensor, which keeps its storage alive, so that no other storage gets its address."""
        self._facts: list[object] = []

    def settle(self) -> None:
        """Keep the form and memory of all tensors, which are plain and strided."""
        self._views = [tensor.detach() for tensor in self.tensors]
        self._facts = self._form()

    def hold(self) -> bool:
        """Return whether model and optimizers still have these tensors, so that views of the tensors are valid."""
        # An emptied storage still exists, and another one may have its address by now: compare both.
        return (
            self._now()[0] == self._structure
            and all(map(is_, map(_PART, self._sharded), self._parts))
            # A step replaces the spec by an equal one.
            and list(map(_SPEC, self._sharded)) == self._specs
            and all(map(torch.Tensor.is_set_to, self.tensors, self._views))
            and self._form() == self._facts
        )

    def _form(self) -> list[object]:
        lazy = [list(map(fact, self._complex)) for fact in _LAZY]
        trained = list(map(_REQUIRES_GRAD, self._sharded))
        return [
            list(map(torch.Tensor.data_ptr, self.tensors)),
            list(map(_FACTS, self.tensors)),
            lazy,
            trained,
        ]

    def _now(self) -> tuple[list[object], list[object]]:
        """Return the places of tensors as names and ids, and the objects, so that no others get these ids."""
        homes = [home for optimizer in self._optimizers for home in homes_of(optimizer, self._optimizers)]
        # With ZeRO a home is the inner optimizer, whose parameters have their slots on this rank.
        optimizers = [*self._optimizers, *(home.optimizer for home in homes)]
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        dicts = list(chain.from_iterable(map(_DICTS, self._modules)))
        buffers = [
            (id(module), name, buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        ]
        states = [
            (parameter, held)
            for home in homes
            for parameter, held in home.optimizer.state.items()
            if isinstance(parameter, torch.Tensor)
        ]
        slots = [
            (key, value)
            for _, held in states
            for key, value in held.items()
            if isinstance(value, torch.Tensor) and key not in NEVER_SLOTS and isinstance(key, str)
        ]
        objects = [
            *self._modules,
            *optimizers,
            *dicts,
            *chain.from_iterable(map(_VALUES, dicts)),
            *chain.from_iterable(groups),
            *chain.from_iterable(states),
            *(buffer for *_, buffer in buffers),
            *(value for _, value in slots),
        ]
        structure: list[object] = [
            list(map(len, dicts)),
            list(chain.from_iterable(dicts)),
            [where for *where, _ in buffers],
            list(map(len, groups)),
            # Counts of steps, which a resume restores, change nothing: only whether there is a state at all.
            [len(held) - (len(held) > 1 and "step" in held) for _, held in states],
            [key for key, _ in slots],
            list(map(id, objects)),
        ]
        return structure, objects


def tensors_now(model: nn.Module, optimizers: Sequence[Optimizer]) -> Tensors | None:
    """Return the current tensors.

    None if a tensor is of a subclass other than DTensor, or sparse: its parts may change while the object stays. None
    if a module overrides named_parameters or named_buffers.
    """
    if not _is_usual(model.named_parameters, nn.Module.named_parameters) or not all(
        _is_usual(module.named_buffers, nn.Module.named_buffers) for module in model.modules()
    ):
        return None
    found = Tensors(model, optimizers)
    types, layouts = set(map(type, found.tensors)), set(map(attrgetter("layout"), found.tensors))
    if not types <= _PLAIN or layouts - {torch.strided}:
        return None
    found.settle()
    return found


def _is_usual(method: Callable[..., object], usual: Callable[..., object]) -> bool:
    return getattr(method, "__func__", None) is usual
