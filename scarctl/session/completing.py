"""Complete a recovery in a running process: restore values of lost partitions from extras, and report problems.

A partial recovery restores the tensors of groups. An optimizer may have more state of a parameter, in another shape.
That state is in the extras, and only the adapter can assign it to parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, restore_lost_of
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.live_state import LiveState
from scarctl.errors import ScarError
from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import plain, torched
from scarctl.state.version import step_of
from scarctl.util.arrays import Ids

_NOT_OPTIMIZERS = ("rng", "extras")
"""What no loss of rows damages."""
_LOOKED_AT = 32
"""Most extras that are read in the search for finite ones."""
Path = tuple[Any, ...]


def complete(engine: Engine, live: LiveState, adapter: Adapter, ids: Ids) -> list[str]:
    """Restore from extras the optimizer state of partitions `ids` (ascending) that is in no group.

    Each value comes from the newest extras in which it is finite. Returns problems as sentences: live values that are
    not finite although a copy is, and failures of reading.
    """
    if not ids.size:
        return []
    left = _values_left(live, ids)
    found = _Found(engine)
    restore = restore_lost_of(adapter)
    try:
        if restore is not None:
            restore(lost_rows(engine.layout, ids), found.newest)
        wrong = dict(_not_finite(_kept(adapter)))
        known: dict[Path, str] = {}
        for version, state in found if wrong else ():
            known |= {path: text for path, text in _named(wrong, state, version).items() if path not in known}
            if restore is not None and known:
                restore({}, lambda state=state: state)
                wrong = dict(_not_finite(_kept(adapter)))
            if not wrong.keys() - known.keys():
                break
        left += [text for path, text in known.items() if path in wrong]
    except ScarError as error:
        left.append(f"optimizer state without the shape of its parameter is not restored: {error.message}")
    return left


def left_behind(engine: Engine, live: LiveState, adapter: Adapter, ids: Ids, state: Any) -> list[str]:
    """Return the problems that remain after a restore: live values that are not finite although their copy is.

    state: the restored extras.
    """
    version = int(engine.arena.newest().max(initial=0))
    return [*_values_left(live, ids), *_named(dict(_not_finite(_kept(adapter))), state, version).values()]


def lost_rows(layout: Layout, ids: Ids) -> dict[str, NDArray[np.bool_]]:
    """Return the rows of `ids` (ascending) by name of the group, bool of shape (rows,)."""
    found: dict[str, NDArray[np.bool_]] = {}
    groups = layout.group_of(ids)
    starts, stops = layout.row_ranges(ids)
    for g in np.unique(groups).tolist():
        mine, group = groups == g, layout.groups[g]
        edges = np.zeros(group.rows + 1, dtype=np.int64)
        np.add.at(edges, starts[mine], 1)
        np.add.at(edges, stops[mine], -1)
        found[group.name] = np.cumsum(edges[:-1]) > 0
    return found


class _Found:
    """Saved extras, newest first. Each is read once, and kept."""

    def __init__(self, engine: Engine) -> None:
        self._unread = islice(engine.copies.all_extras(), _LOOKED_AT)
        self._read: list[tuple[int, Any]] = []

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        yield from self._read
        for found in self._unread:
            self._read.append((found.version, found.extras.state))
            yield self._read[-1]

    def newest(self) -> Any:
        """Return the newest extras. Raises ScarError if no extras can be read."""
        for _, state in self:
            return state
        raise ScarError("no extras can be read", kind="no-extras")


def _values_left(live: LiveState, ids: Ids) -> list[str]:
    bad = live.not_finite(ids)
    names = ", ".join(live.layout.name(int(i)) for i in bad[:5])
    more = f" and {bad.size - 5} more" if bad.size > 5 else ""
    return [f"{names}{more}: values are not finite, but those of the copy are"] if bad.size else []


def _kept(adapter: Adapter) -> Any:
    found: Any = torched(plain(adapter.capture()))
    return {name: value for name, value in found.items() if name not in _NOT_OPTIMIZERS}


def _not_finite(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors and numbers inside dicts, lists and tuples that hold Inf or NaN, with their places."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _not_finite(item, (*path, number))
    elif not _finite(value).all():
        yield path, value


def _finite(value: Any) -> NDArray[np.bool_]:
    """Return the mask of finite values of a tensor, array or number; True for other objects."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.isfinite(value.to(torch.float64)).numpy(force=True)
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
        return np.asarray(np.isfinite(value))
    return np.array(not isinstance(value, float) or math.isfinite(value))


def _named(wrong: Mapping[Path, Any], state: Any, version: int) -> dict[Path, str]:
    """Return a sentence for each value in `wrong` that is finite in the copy `state`."""
    found = {}
    for path, value in wrong.items():
        copy = _at(state, path)
        if copy is None:
            continue
        here, there = _finite(value), _finite(copy)
        if here.shape == there.shape and (~here & there).any():
            where = ".".join(map(str, path))
            found[path] = f"{where}: values are not finite, but those saved at step {step_of(version)} are"
    return found


def _at(value: Any, path: Path) -> Any:
    """Return the value at a place in dicts, lists and tuples; None if the place does not exist."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
