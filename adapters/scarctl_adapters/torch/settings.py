"""Read schedules, the settings that they change and a gradient's scale as they are now, without waiting for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from scarctl.state.torch_dtypes import Deferred
from scarctl.stateful import state_of
from scarctl_adapters.torch.optimizer_state import is_savable
from scarctl_adapters.torch.packing import LEAVES

_CONSTANT = frozenset((*LEAVES, list, tuple))
"""Types of values other than tensors."""


def _copy_tensors(group: dict[str, Any]) -> None:
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and is_savable(value):
            group[key] = value.detach().clone()


def savable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a param_group that extras can hold."""
    return {key: value for key, value in group.items() if key != "params" and is_savable(value)}


class Later(Deferred):
    """Values that only a step changes, read when they are saved."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def value(self) -> Any:
        """Return the values."""
        return self._read()


class Settled(Deferred):
    """An optimizer's settings at one moment, with the rest of its state."""

    __slots__ = ("_rest", "_settings")

    def __init__(self, optimizer: Optimizer, rest: Callable[[], dict[str, Any]]) -> None:
        """rest: returns the state; its settings are those of the time when it is called."""
        found = self._settings = list(map(dict, optimizer.param_groups))
        for group in found:
            if not _CONSTANT.issuperset(map(type, group.values())):
                _copy_tensors(group)
        self._rest = rest

    def value(self) -> dict[str, Any]:
        """Return the state with these settings."""
        rest = self._rest()
        count = len(rest["param_groups"])  # a group that was added since is not one of the step's
        return {**rest, "param_groups": list(map(savable, self._settings[:count]))}


class _Scale(Deferred):
    """The state of a gradient scaler at one moment."""

    __slots__ = ("_growth", "_scale", "_scaler")

    def __init__(self, scaler: GradScaler) -> None:
        scale, growth = scaler._scale, scaler._growth_tracker
        self._scaler = scaler
        self._scale, self._growth = (None if each is None else each.clone() for each in (scale, growth))

    def value(self) -> dict[str, Any]:
        """Return its state_dict."""
        found = self._scaler.state_dict()
        if found and self._scale is not None and self._growth is not None:
            found |= {"scale": float(self._scale), "_growth_tracker": int(self._growth)}
        return found


def object_of(item: Any) -> Any:
    """Return the state of a scheduler or scaler. `state_dict` of a scaler would wait for the GPU."""
    return _Scale(item) if isinstance(item, GradScaler) else state_of(item)
