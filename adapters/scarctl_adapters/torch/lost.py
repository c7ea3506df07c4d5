"""Restore optimizer state of lost parameters that is in no slot, because its shape differs from the parameter's.

Adafactor keeps one number per row and one per column, SOAP matrices of each dimension, LBFGS vectors over all
parameters under the first of them. A partial recovery restores it from the newest extras:

- one number per row (as many values as the parameter has rows): for lost rows, and where it is not finite;
- other values with a size, all together: if the whole parameter was lost, or some value is not finite. A part of them
  would not fit the rest;
- a single number, such as a step count: if it is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl_adapters.torch.homes import Home, states_of
from scarctl_adapters.torch.optimizer_state import references_of
from scarctl_adapters.torch.packing import References, unpack
from scarctl_adapters.torch.sharding import local_part, params_of
from scarctl_adapters.torch.slots import is_slot

Rows = NDArray[np.bool_]


def restore_lost(
    optimizers: Sequence[Sequence[Home]],
    names: Mapping[int, str],
    lost: Mapping[str, Rows],
    saved: Callable[[], Any],
) -> None:
    """Restore the optimizer state of lost rows.

    optimizers: for each optimizer its own home, then the homes of optimizers that it wraps. names: names of groups, by
    id of the parameter. lost: masks by group, bool of shape (rows,). saved: returns extras; called only if needed.
    """
    for number, homes in enumerate(optimizers):
        for home in homes:
            for at, parameter, state in _states(home):
                rows = lost.get(names.get(id(parameter), ""))
                own = {key: value for key, value in state.items() if not is_slot(key, value, parameter)}
                if not _needs_copies(own, rows):
                    continue
                theirs = saved()["optimizers"][number]
                found = theirs.get("nested", {}).get(home.prefix, {}) if home.prefix else theirs
                count = local_part(parameter).shape[0] if parameter.dim() else 1
                copies = _copies(found, at, references_of(home))
                for key, value in _restored(own, copies, rows, count, parameter.device).items():
                    state[key] = value


def _states(home: Home) -> Iterator[tuple[int, torch.Tensor, Any]]:
    """Yield number, parameter and state of the parameters that have state."""
    held = {} if home.shares else states_of(home.optimizer)
    for number, parameter in enumerate(params_of(home.optimizer)):
        if held.get(id(parameter)):
            yield number, parameter, held[id(parameter)]


def _needs_copies(own: Mapping[str, Any], rows: Rows | None) -> bool:
    """Return whether a part of this state may have to be restored."""
    return any(not is_finite(value) or (rows is not None and not _is_single(value)) for value in own.values())


def _copies(saved: Mapping[str, Any], number: int, references: References) -> dict[str, Any]:
    """Return the saved state of the parameter of this number, except random number generators."""
    found = {}
    for kind in ("columns", "packed"):
        for key, (where, values) in saved.get(kind, {}).items():
            for at in np.flatnonzero(np.asarray(where) == number)[:1].tolist():
                node = values[at]
                if kind == "columns":
                    found[key] = node
                elif not (isinstance(node, tuple) and node[:1] == ("generator",)):
                    found[key] = unpack(node, references)
    return found


def _restored(
    own: Mapping[str, Any], copies: Mapping[str, Any], rows: Rows | None, count: int, device: torch.device
) -> dict[str, Any]:
    """Return the entries of `own` that change. rows: the lost ones; None if the parameter was not lost."""
    changed = {}
    whole = [key for key, value in own.items() if not _is_single(value) and not _is_per_row(value, count)]
    together = bool(rows is not None and rows.all()) or not all(is_finite(own[key]) for key in whole)
    for key, value in own.items():
        if key not in copies or not is_finite(copies[key]):
            continue  # the copy is no better
        if _is_single(value):
            if not is_finite(value):
                changed[key] = _like(value, copies[key], device)
        elif key in whole:
            if together:
                changed[key] = _like(value, copies[key], device)
        else:
            _put_rows(value, copies[key], rows)
    return changed


def _put_rows(value: torch.Tensor, copy: Any, rows: Rows | None) -> None:
    """Restore state with one number per row: numbers of lost rows, and numbers that are not finite."""
    if not isinstance(copy, torch.Tensor) or copy.shape != value.shape:
        return
    there = copy.to(value.device, value.dtype)
    wanted = ~torch.isfinite(value)
    if rows is not None:
        wanted |= torch.from_numpy(rows).to(value.device).reshape(value.shape)
    value.copy_(torch.where(wanted, there, value))


def _like(value: Any, copy: Any, device: torch.device) -> Any:
    """Return the copy with its tensors on the devices of the tensors in `value`."""
    if isinstance(copy, torch.Tensor):
        return copy.clone().to(value.device if isinstance(value, torch.Tensor) else device)
    if isinstance(copy, list | tuple):
        pairs = value if isinstance(value, list | tuple) and len(value) == len(copy) else [None] * len(copy)
        return type(copy)(_like(a, b, device) for a, b in zip(pairs, copy, strict=True))
    if isinstance(copy, dict):
        there = value if isinstance(value, dict) else {}
        return {key: _like(there.get(key), item, device) for key, item in copy.items()}
    return copy


def _is_single(value: Any) -> bool:
    """Return whether a value is a single number, or is empty."""
    if isinstance(value, torch.Tensor):
        return not value.dim()
    return not isinstance(value, list | tuple | dict)


def _is_per_row(value: Any, count: int) -> bool:
    """Return whether a value has one number for each of `count` rows: shape (count,), (count, 1), ..."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == count == value.numel()


def is_finite(value: Any) -> bool:
    """Return whether no number in a value is Inf or NaN."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return True
