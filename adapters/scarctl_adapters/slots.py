"""Optimizer state of a parameter's shape: what there is, and what there will be when it is first stepped."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, SparseAdam

from scarctl.dtypes import torch_of
from scarctl.layout import Layout
from scarctl_adapters.fsdp import is_part_like, local_part, with_state

Template = Mapping[str, torch.dtype | None]
"""Slots that an optimizer gives a parameter, and their dtype (None: the parameter's)."""

# Adam's step counts are 0-dim tensors, like the moments of a 0-dim parameter: only the name tells them apart.
_NEVER_SLOTS = frozenset({"step"})

log = logging.getLogger("scarctl")


def is_slot(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether an entry of the optimizer's state of `parameter` is one of its slots."""
    return key not in _NEVER_SLOTS and is_part_like(value, parameter)


class Slots:
    """Slots of all parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._templates: dict[int, Template] = {}
        """By id of the parameter."""
        self._foretold: dict[tuple[int, int], Template] = {}
        """By number of the group of parameters, and number of dimensions: both decide what some optimizers keep."""
        self._awaited: set[int] = set()
        """Ids of parameters whose slots the layout has though they were not there yet."""

    def learn(self, *, foretell: bool) -> None:
        """See what the optimizer keeps by now: before `of` is asked.

        foretell: also what it will keep of parameters when it has stepped none that are like them yet.
        """
        optimizer = with_state(self._optimizer)
        self._templates = {}
        for number, group in enumerate(optimizer.param_groups):
            known: dict[int, Template] = {}
            for parameter in group["params"]:
                if parameter.dim() not in known and optimizer.state.get(parameter):
                    known[parameter.dim()] = _template(optimizer.state[parameter], parameter)
            for parameter in group["params"]:
                dims = parameter.dim()
                if dims not in known and foretell and self._is_awaited(parameter):
                    if (number, dims) not in self._foretold:
                        self._foretold[number, dims] = _try_out(optimizer, group, parameter)
                    known[dims] = self._foretold[number, dims]
                self._templates[id(parameter)] = known.get(dims, {})

    def _is_awaited(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or id(parameter) in self._awaited

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether `learn` has found the parameter in the optimizer."""
        return id(parameter) in self._templates

    def of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Those of `parameter` by name: what this process has of them, or zeros in their place."""
        state = with_state(self._optimizer).state.get(parameter, {})
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
    layout: Layout, parameters: Mapping[str, nn.Parameter], owners: Mapping[int, Optimizer]
) -> Callable[[], None]:
    """Make every slot of `layout` that is not there yet; the returned function takes them away again.

    parameters: by name of their group. owners: the optimizer that has a parameter's state, by the parameter's id.
    """
    created: list[tuple[Optimizer, nn.Parameter, str]] = []
    for group in layout.groups:
        parameter = parameters.get(group.name)
        if parameter is None or id(parameter) not in owners:
            continue
        state = owners[id(parameter)].state[parameter]
        for spec in group.tensors[1:]:
            if spec.slot not in state:
                # Filled by whoever restores: to fill it here as well would take as long again.
                state[spec.slot] = torch.empty_like(parameter.detach(), dtype=torch_of(spec.dtype))
                created.append((owners[id(parameter)], parameter, spec.slot))

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


def _try_out(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> Template:
    """The slots that `optimizer` will give a parameter of `group` that it has not stepped yet.

    Learnt from a step of its class with the group's settings and a small parameter: a loop may step one of its
    optimizers first, and the others much later. Neither the optimizer nor random numbers are changed.
    """
    # Dimensions of different sizes: what is kept per row or per column is no slot.
    shape = range(2, 2 + parameter.dim())
    small = nn.Parameter(torch.zeros(*shape, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    if isinstance(optimizer, SparseAdam):
        small.grad = small.grad.to_sparse(1)
    twin = object.__new__(type(optimizer))
    # Without hooks, and without a scheduler's wrapper of the original's `step`.
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [small]}]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    devices = [small.device.index] if small.is_cuda else []
    try:
        with torch.random.fork_rng(devices):
            twin.step()
    except (
        Exception
    ) as error:  # of anybody's class; then the first checkpoint after its first step tells of it
        log.debug("%s does not say what it keeps: %s", type(optimizer).__name__, error)
        return {}
    return _template(twin.state.get(small, {}), small)
