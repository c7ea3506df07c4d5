"""Read the bytes of a state from its store, spoil live rows, and check the groups of an adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, StateGroup
from scarctl.session.session import Session
from scarctl.state.layout import Layout
from scarctl.store import Store
from scarctl.testing.fingerprint import adapter_of, differing, digest, is_placeholder, layout_of

State = dict[tuple[str, str], NDArray[np.uint8]]
"""By (group, slot): uint8 of shape (rows, bytes per row)."""

# -- stores ------------------------------------------------------------------------------------------------------


def stored_layout(store: Path) -> Layout:
    opened = Store.open(store)
    with contextlib.closing(opened):
        layout = opened.current_layout()
    assert layout is not None
    return layout


def stored(store: Path) -> State:
    """Return the bytes in a store, by (group, slot)."""
    opened = Store.open(store)
    with contextlib.closing(opened):
        layout = opened.current_layout()
        assert layout is not None
        found = {
            (group.name, spec.slot): np.zeros((spec.rows, spec.row_bytes), np.uint8)
            for group in layout.groups
            for spec in group.tensors
        }
        damaged: list[Any] = []
        for state in opened.states(opened.shards()).values():
            for batch in opened.read(state, state.ids[state.saved], corrupt=damaged):
                group = layout.groups[batch.group]
                starts, stops = layout.row_ranges(batch.ids)
                rows = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
                for spec, data in zip(group.tensors, batch.tensors, strict=True):
                    found[group.name, spec.slot][rows] = data
    assert not damaged, f"the store is damaged: {damaged}"
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


# -- groups ------------------------------------------------------------------------------------------------------


def differing_rows(a: State, b: State) -> list[tuple[str, str]]:
    return [key for key in {**a, **b} if key not in a or key not in b or not np.array_equal(a[key], b[key])]


def check_groups(session: Session) -> None:
    """Assert the rules for the groups of every adapter."""
    groups = adapter_of(session).groups()
    names = [group.name for group in groups]
    assert len(set(names)) == len(names), f"two groups have the same name: {names}"
    for group in groups:
        assert next(iter(group.tensors)) == "", f"{group.name}: the parameter is not the first of its tensors"
        shape = tuple(group.tensors[""].shape)
        shapes = {tuple(tensor.shape) for tensor in group.tensors.values()}
        assert shapes <= {shape, shape[:1]}, f"{group.name}: its tensors have the shapes {shapes}"
    buffers = {group.name: group.tensors[""] for group in groups if group.kind == "buffer"}
    found = adapter_of(session).buffers()
    assert differing(_digests(buffers), _digests(found)) == [], (
        f"buffers() gives {sorted(found)}, groups() has {sorted(buffers)}, or they have other values"
    )
    _check_memory(groups)


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def _check_memory(groups: list[StateGroup]) -> None:
    """Assert that no two tensors share memory: restoring one would change the other."""
    seen: dict[int, str] = {}
    for group in groups:
        for slot, tensor in group.tensors.items():
            if tensor.numel() and not is_placeholder(tensor):
                other = seen.setdefault(tensor.data_ptr(), f"{group.name}/{slot}")
                assert other == f"{group.name}/{slot}", f"{other} and {group.name}/{slot} are the same memory"


def sized(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors with dimensions inside dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() and value.is_floating_point() else []
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in sized(item)]


def row_count(group: StateGroup) -> int:
    tensor = group.tensors[""]
    return tensor.shape[0] if tensor.dim() else 1


def rows_of_shard(session: Session, shard: int) -> dict[str, NDArray[np.bool_]]:
    """Return the rows of a shard for every group: bool of shape (rows,)."""
    layout = layout_of(session)
    masks = {group.name: np.zeros(group.rows, bool) for group in layout.groups}
    ids = np.flatnonzero(session.store.shard_of(layout) == shard)
    for g, start, stop in zip(layout.group_of(ids), *layout.row_ranges(ids), strict=True):
        masks[layout.groups[g].name][start:stop] = True
    return masks


def spoil(adapter: Adapter, lost: Mapping[str, NDArray[np.bool_]]) -> None:
    """Fill lost rows with values that no training makes: NaN, or 1 for integers."""
    with torch.no_grad():
        for group in adapter.groups():
            rows = torch.from_numpy(lost[group.name])
            for tensor in group.tensors.values():
                if is_placeholder(tensor) or not tensor.numel():
                    continue
                if tensor.dim():
                    tensor[rows.to(tensor.device)] = _garbage(tensor)
                elif rows.all():
                    tensor.fill_(_garbage(tensor))


def _garbage(tensor: torch.Tensor) -> float | int:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else 1
