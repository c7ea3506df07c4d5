"""Read the late extras that are quick to read: schedules, the settings that they change, gradient scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from scarctl.state.torch_dtypes import Deferred, plain
from scarctl_adapters.torch.optimizer_state import is_savable
from scarctl_adapters.torch.packing import LEAVES

Changing: TypeAlias = "LRScheduler | GradScaler"


def changing(late: Mapping[str, Any]) -> dict[str, Changing]:
    """Return the schedulers and scalers in `late`, by name."""
    return {name: item for name, item in late.items() if isinstance(item, LRScheduler | GradScaler)}


def light_of(late: Mapping[str, Changing], optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return pairs of names and states: of the schedulers and scalers in `late`, then each optimizer's param_groups.

    Does not wait for a GPU: its tensors are copied on the GPU.
    """
    found: list[Any] = [
        [number, [*map(Settings, optimizer.param_groups)]] for number, optimizer in enumerate(optimizers)
    ]
    if late:
        found[:0] = (
            [name, _scale_of(item) if isinstance(item, GradScaler) else plain(item.state_dict())]
            for name, item in late.items()
        )
    return found


def with_light(late: Mapping[str, Any], light: Sequence[Any]) -> dict[str, Any]:
    """Return `late`, of `TorchAdapter.capture_late`, updated by the result of `light_of`."""
    objects, optimizers = dict(late["objects"]), list(late["optimizers"])
    for name, state in light:
        if isinstance(name, int):
            optimizers[name] = {**optimizers[name], "param_groups": state}
        elif isinstance(state, list):
            scale, growth = state
            if objects[name]:
                objects[name] = {**objects[name], "scale": float(scale), "_growth_tracker": int(growth)}
        else:
            objects[name] = state
    return {**late, "objects": objects, "optimizers": optimizers}


_CONSTANT = frozenset((*LEAVES, list, tuple))
"""Types of values other than tensors."""


class Settings(Deferred):
    """The settings of a param_group at one moment."""

    __slots__ = ("_found",)

    def __init__(self, group: Mapping[str, Any]) -> None:
        found = dict(group)
        if not _CONSTANT.issuperset(map(type, found.values())):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and is_savable(value):
                    found[key] = value.detach().clone()
        self._found = found

    def value(self) -> dict[str, Any]:
        """Return the settings that extras can hold."""
        return {key: value for key, value in self._found.items() if key != "params" and is_savable(value)}


def _scale_of(scaler: GradScaler) -> Any:
    """Return [scale, growth tracker], a form that no other state has; {} if the scaler is disabled."""
    if not scaler.is_enabled():
        return {}
    scale, growth = scaler._scale, scaler._growth_tracker  # state_dict() would wait for the GPU
    if scale is None or growth is None:
        return [scaler.get_scale(), scaler._init_growth_tracker]
    return [scale.clone(), growth.clone()]
