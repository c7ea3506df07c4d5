"""Save an optimizer's own attributes that training has changed: counters, generators, helpers with a state.

Most of them are in no `state_dict`. Objects are never created from a store: only an object's changed attributes are
saved, and they are set on the object that the new process has created.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from scarctl.errors import UsageError
from scarctl.stateful import state_of
from scarctl_adapters.torch.packing import GENERATORS, LEAVES, References, Unsavable, pack, unpack

# Attributes of every torch optimizer, a scheduler's wrapper of `step`, and those a gradient scaler sets for one step.
OF_THE_BASE = frozenset(
    {"defaults", "state", "param_groups", "step", "grad_scale", "found_inf", "_opt_called"}
    | {"_zero_grad_profile_name", "_patch_step_function", "_warned_capturable_if_run_uncaptured"}
    | {
        f"_optimizer_{what}_hooks"
        for what in (
            "step_pre",
            "step_post",
            "state_dict_pre",
            "state_dict_post",
            "load_state_dict_pre",
            "load_state_dict_post",
        )
    }
)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_CONSTANT = (
    *(torch.dtype, torch.device, torch.nn.Module, Optimizer, enum.Enum, type),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, functools.partial),
    *(logging.Logger, weakref.ref),
)
"""Types whose values do not change, or do not belong to the optimizer."""
_DEPTH = 8
_SMALL = 1 << 12
"""Most elements of a tensor whose values are compared: torch does not count writes through `.data`."""

Path = tuple[str, ...]


class Attributes:
    """The attributes of one optimizer, compared with those when it was attached."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # An optimizer that was stepped before has unknown initial values.
        self._first: dict[Path, Any] = {} if optimizer.state else self._now()
        self._had = {path for path, _ in _walk(optimizer)}
        self._kept = [value for _, value in _walk(optimizer)]
        """Values that are kept alive, so that no other object gets their ids."""

    def _now(self) -> dict[Path, Any]:
        return {path: _print(value) for path, value in _walk(self._optimizer)}

    def capture(self, references: References, unsavable: Callable[[str], None]) -> list[tuple[Any, Any]]:
        """Return paths and packed values of the changed attributes. unsavable: called with a text if packing fails."""
        found = []
        for path, value in _walk(self._optimizer):
            if path in self._first and self._first[path] == _print(value):
                continue
            try:
                found.append((path, pack(value, references, ".".join(path))))
            except Unsavable as error:
                if self._first or path not in self._had:
                    unsavable(str(error))
        return found

    def restore(self, saved: Sequence[tuple[Any, Any]], references: References) -> None:
        """Set the captured attributes. Raises UsageError if the optimizer lacks one of the objects."""
        for path, node in saved:
            holder: Any = self._optimizer
            for name in path[:-1]:
                holder = vars(holder).get(name) if hasattr(holder, "__dict__") else None
            name = path[-1]
            if not hasattr(holder, "__dict__") or (holder is self._optimizer and name in OF_THE_BASE):
                raise UsageError(f"this optimizer lacks {'.'.join(path)!r}, which the store has")
            vars(holder)[name] = unpack(node, references, vars(holder).get(name))


def _walk(holder: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """Yield attributes that may change, by path. An object is replaced by its own attributes."""
    seen = set() if seen is None else seen
    seen.add(id(holder))
    for name, value in list(vars(holder).items()):
        if (not path and name in OF_THE_BASE) or id(value) in seen:
            continue
        if _is_object(value):
            if len(path) < _DEPTH:
                yield from _walk(value, (*path, name), seen)
        elif not isinstance(value, _CONSTANT) and not callable(value):
            yield (*path, name), value


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with its own attributes that may change."""
    known = (*LEAVES, *_CONTAINERS, *_CONSTANT, *GENERATORS, Mapping, torch.Tensor, np.ndarray, np.generic)
    return hasattr(value, "__dict__") and not isinstance(value, known)


def _print(value: Any, depth: int = _DEPTH) -> Any:
    """Return a fingerprint that changes with the value."""
    kind = type(value)
    if kind in LEAVES or isinstance(value, np.generic):
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        return _print_tensor(value)
    if isinstance(value, np.ndarray):
        return kind, value.dtype.str, value.shape, value.tobytes() if not value.dtype.hasobject else id(value)
    if isinstance(value, GENERATORS):
        return kind, _print(state_of(value), depth - 1)
    if depth <= 0:
        return kind, id(value)
    if isinstance(value, _CONTAINERS):
        return kind, tuple(_print(item, depth - 1) for item in value)
    if isinstance(value, Mapping):
        return kind, tuple((repr(key), _print(item, depth - 1)) for key, item in value.items())
    if _is_object(value):
        return id(value), tuple((path, _print(item, 1)) for path, item in _walk(value))
    return kind, id(value)


def _print_tensor(value: torch.Tensor) -> Any:
    small = not isinstance(value, torch.nn.Parameter) and value.numel() <= _SMALL
    if not small or value.device.type != "cpu" or value.layout is not torch.strided:
        return id(value), value._version
    return id(value), value._version, repr(value.detach().reshape(-1).tolist())
