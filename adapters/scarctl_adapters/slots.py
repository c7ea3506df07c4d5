"""Optimizer state of a parameter's shape: what there is, and what there will be when it is first stepped."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from scarctl.dtypes import torch_of
from scarctl.layout import Layout
from scarctl.stateful import capture_host_rng, restore_host_rng
from scarctl_adapters.attributes import OF_THE_BASE
from scarctl_adapters.fsdp import is_dtensor, is_part_like, local_part, world
from scarctl_adapters.homes import Holder, Home, slot_of, states_of
from scarctl_adapters.packing import is_plain_tensor

Template = Mapping[str, torch.dtype | None]
"""Slots that an optimizer gives a parameter, and their dtype (None: the parameter's)."""

# Adam's step counts are 0-dim tensors, like the moments of a 0-dim parameter: only the name tells them apart.
NEVER_SLOTS = frozenset({"step"})

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

log = logging.getLogger("scarctl")


def is_slot(key: Any, value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry of the optimizer's state of `parameter` is one of its slots."""
    return (
        key not in NEVER_SLOTS
        and isinstance(key, str)
        and value is not parameter
        and is_part_like(value, parameter)
        and (is_dtensor(value) or is_plain_tensor(value))
    )


class Slots:
    """Slots of all parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._templates: dict[int, Template] = {}
        """By id of the parameter."""
        self._foretold: dict[tuple[int, int], Template | None] = {}
        """By number of the group of parameters, and number of dimensions: both decide what some optimizers keep.
        None: it cannot be told."""
        self._states: dict[int, MutableMapping[str, Any]] = {}
        """As `learn` has found them, by id of the parameter."""
        self._awaited: set[int] = set()
        """Ids of parameters whose slots the layout has though they were not there yet."""

    def learn(self, *, foretell: bool) -> None:
        """See what the optimizer keeps by now: before `of` is asked.

        foretell: also what it will keep of parameters when it has stepped none that are like them yet.
        """
        optimizer = self._optimizer
        self._templates, self._states = {}, states_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            known: dict[int, Template] = {}
            for parameter in group["params"]:
                if parameter.dim() not in known and self._states.get(id(parameter)):
                    known[parameter.dim()] = _template(self._states[id(parameter)], parameter)
            for parameter in group["params"]:
                dims = parameter.dim()
                if dims not in known and foretell and self._is_awaited(parameter):
                    if (number, dims) not in self._foretold:
                        self._foretold[number, dims] = _try_out(optimizer, group, parameter)
                    foretold = self._foretold[number, dims]
                    known[dims] = _of_others(optimizer) if foretold is None else foretold
                self._templates[id(parameter)] = known.get(dims, {})

    def _is_awaited(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or id(parameter) in self._awaited

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether `learn` has found the parameter in the optimizer."""
        return id(parameter) in self._templates

    def of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Those of `parameter` by name: what this process has of them, or zeros in their place."""
        state = self._states.get(id(parameter), {})
        slots = {key: local_part(value) for key, value in state.items() if is_slot(key, value, parameter)}
        if state or not self._is_awaited(parameter):
            return slots
        self._awaited.add(id(parameter))
        # No gradient has reached this parameter yet. Its slots will come, and are zero until then: the layout has
        # them from the start.
        zero, shape = torch.zeros((), device=parameter.device), local_part(parameter).shape
        template = self._templates[id(parameter)]
        return {key: zero.to(dtype or parameter.dtype).expand(shape) for key, dtype in template.items()}


def create_slots(
    layout: Layout, holders: Mapping[str, Sequence[Holder]], homes: Sequence[Home]
) -> Callable[[], None]:
    """Make every slot of `layout` that is not there yet; the returned function takes them away again.

    holders: the parameters of a group, by its name.
    """
    created: list[tuple[Optimizer, nn.Parameter, str]] = []
    for group in layout.groups:
        for spec in group.tensors[1:]:
            found = slot_of(spec.slot, holders.get(group.name, ()), homes)
            if found is None:
                continue
            optimizer, parameter, key = found
            if not is_slot(key, optimizer.state[parameter].get(key), parameter):
                # Filled by whoever restores: to fill it here as well would take as long again.
                slot = torch.empty_like(parameter.detach(), dtype=torch_of(spec.dtype))
                optimizer.state[parameter][key] = slot
                created.append(found)

    def remove() -> None:
        for optimizer, parameter, slot in created:
            optimizer.state[parameter].pop(slot, None)
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]

    return remove


def _template(state: Mapping[str, Any], parameter: torch.Tensor) -> Template:
    return {
        key: None if value.dtype == parameter.dtype else value.dtype
        for key, value in state.items()
        if is_slot(key, value, parameter)
    }


def _of_others(optimizer: Optimizer) -> Template:
    """What the optimizer keeps of some parameter that it has stepped: the best guess for all others."""
    held = optimizer.state.items()
    found = (_template(state, parameter) for parameter, state in held if isinstance(parameter, torch.Tensor))
    return next(filter(None, found), {})


def _try_out(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> Template | None:
    """The slots that `optimizer` will give a parameter of `group` that it has not stepped yet; None: who knows.

    Learnt from a step of its class with the group's settings and a small parameter: a loop may step one of its
    optimizers first, and the others much later. Neither the optimizer nor random numbers are changed.
    """
    kind = type(optimizer)
    try:
        twin, small = _twin(optimizer, group, parameter)
        if twin is None:
            return None
        step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step  # type: ignore[attr-defined]
        generators = capture_host_rng()
        try:
            with torch.random.fork_rng([small.device.index] if small.is_cuda else []):
                step(twin)
        finally:
            restore_host_rng(generators)
        return _template(twin.state.get(small, {}), small)
    except Exception as error:
        # Of anybody's class. Then the first checkpoint after its first step tells of it.
        log.debug("%s does not say what it keeps: %s", kind.__name__, error)
        return None


def _twin(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> tuple[Optimizer | None, nn.Parameter]:
    """An optimizer of the same class and settings for a small parameter alone, with a gradient of zeros.

    None where its step might reach more than that: parameters that it has a list of, the optimizer that it wraps,
    a generator of its own, and other ranks.
    """
    # Dimensions of different sizes: what is kept per row or per column is no slot.
    shape = tuple(range(2, 2 + parameter.dim()))
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    if isinstance(optimizer, SparseAdam):
        small.grad = small.grad.to_sparse(1)
    own = {key: value for key, value in vars(optimizer).items() if key not in OF_THE_BASE}
    foreign = world() > 1 and not type(optimizer).__module__.startswith("torch.optim.")
    if foreign or not all(isinstance(value, _PLAIN) for value in own.values()):
        return None, small
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(own)
    twin.defaults = deepcopy(optimizer.defaults)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**deepcopy({k: v for k, v in group.items() if k != "params"}), "params": [small]}]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin, small
