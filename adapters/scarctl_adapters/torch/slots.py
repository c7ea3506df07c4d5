"""Find a parameter's optimizer slots (state of its shape), and predict them before the first step."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import torch_of
from scarctl.stateful import capture_host_rng, restore_host_rng
from scarctl.util.ranks import world_size
from scarctl_adapters.torch.attributes import OF_THE_BASE
from scarctl_adapters.torch.homes import Holder, Home, slot_of, states_of
from scarctl_adapters.torch.packing import is_plain_tensor
from scarctl_adapters.torch.sharding import is_dtensor, is_part_like, local_part

Template = Mapping[str, torch.dtype | None]
"""Slots that an optimizer creates for a parameter, with their dtype (None: the parameter's)."""

# Adam's step counts are 0-dim tensors, like the moments of a 0-dim parameter: only the names differ.
NEVER_SLOTS = frozenset({"step"})

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

log = logging.getLogger("scarctl")


def is_slot(key: Any, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether an entry of the optimizer's state of `parameter` is one of its slots."""
    return (
        key not in NEVER_SLOTS
        and isinstance(key, str)
        and value is not parameter
        and is_part_like(value, parameter)
        and (is_dtensor(value) or is_plain_tensor(value))
    )


class Slots:
    """The slots of all parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._templates: dict[int, Template] = {}
        """Slots by id of the parameter."""
        self._predicted: dict[tuple[int, int], Template | None] = {}
        """Slots by number of the param_group and number of dimensions, because some optimizers' slots depend on both.
        None: unknown."""
        self._states: dict[int, MutableMapping[str, Any]] = {}
        """Slots at the newest `learn`, by id of the parameter."""
        self._awaited: set[int] = set()
        """Ids of parameters whose slots were in the layout before the slots existed."""

    def learn(self, *, predict: bool) -> None:
        """Read the optimizer's present slots. Call it before `of`.

        predict: predict also the slots of parameters without a similar one that was stepped.
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
                if dims not in known and predict and self._is_awaited(parameter):
                    if (number, dims) not in self._predicted:
                        self._predicted[number, dims] = _try_out(optimizer, group, parameter)
                    predicted = self._predicted[number, dims]
                    known[dims] = _of_others(optimizer) if predicted is None else predicted
                self._templates[id(parameter)] = known.get(dims, {})

    def _is_awaited(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or id(parameter) in self._awaited

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Return whether `learn` has found the parameter in the optimizer."""
        return id(parameter) in self._templates

    def of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the slots of `parameter` by name: this process's part, or zeros for slots that do not exist yet."""
        state = self._states.get(id(parameter), {})
        slots = {key: local_part(value) for key, value in state.items() if is_slot(key, value, parameter)}
        if state or not self._is_awaited(parameter):
            return slots
        self._awaited.add(id(parameter))
        # No gradient has reached this parameter yet. The layout has its slots from the start; they are zero until the
        # optimizer makes them.
        zero, shape = torch.zeros((), device=parameter.device), local_part(parameter).shape
        template = self._templates[id(parameter)]
        return {key: zero.to(dtype or parameter.dtype).expand(shape) for key, dtype in template.items()}


def create_slots(
    layout: Layout, holders: Mapping[str, Sequence[Holder]], homes: Sequence[Home]
) -> Callable[[], None]:
    """Make every missing slot of `layout`, and return the function that removes them.

    holders: the parameters of a group, by its name.
    """
    created: list[tuple[Optimizer, nn.Parameter, str]] = []
    known = [(home, home.numbers()) for home in homes]
    for group in layout.groups:
        for spec in group.tensors[1:]:
            found = slot_of(spec.slot, holders.get(group.name, ()), known)
            if found is None:
                continue
            optimizer, parameter, key = found
            if not is_slot(key, optimizer.state[parameter].get(key), parameter):
                # The caller restores all values: filling the slot here would double the time.
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
    """Return the slots of a parameter that the optimizer has stepped: the best guess for the others."""
    held = optimizer.state.items()
    found = (_template(state, parameter) for parameter, state in held if isinstance(parameter, torch.Tensor))
    return next(filter(None, found), {})


def _try_out(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> Template | None:
    """Return the slots that `optimizer` will make for a parameter of `group` that it has not stepped; None: unknown.

    A twin of the optimizer, with the group's settings, steps a small parameter: a loop may step one of its optimizers
    much later than the others. Neither the optimizer nor random numbers change.
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
        # Classes of other packages may raise anything. The checkpoint after the first real step finds the slots.
        log.debug("the slots of %s are unknown before its first step: %s", kind.__name__, error)
        return None


def _twin(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> tuple[Optimizer | None, nn.Parameter]:
    """Return an optimizer of the same class and settings for one small parameter, and that parameter.

    None if its step could affect more: a list of parameters, a wrapped optimizer, a generator, other ranks.
    """
    # Sizes differ by dimension, so that state per row or per column does not look like a slot.
    shape = tuple(range(2, 2 + parameter.dim()))
    small = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    if isinstance(optimizer, SparseAdam):
        small.grad = small.grad.to_sparse(1)
    own = {key: value for key, value in vars(optimizer).items() if key not in OF_THE_BASE}
    foreign = world_size() > 1 and not type(optimizer).__module__.startswith("torch.optim.")
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
