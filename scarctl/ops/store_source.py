"""Read the tensors of a store in blocks: its newest copies, a snapshot, or a sealed state. Every copy is verified."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.errors import NoIntactCopy
from scarctl.formats.source import Source, open_source
from scarctl.formats.state_writer import Rows
from scarctl.ops.assemble import check_complete, content, whole_groups
from scarctl.ops.sinks import FileSink
from scarctl.recovery.plan import Plan
from scarctl.recovery.shared_plan import SharedPlan, execute_shared, plan_lost, plans_back
from scarctl.recovery.shares import SharedState, named_snapshot, open_shares
from scarctl.state.group import Group
from scarctl.state.layout import Layout, TensorSpec
from scarctl.store import Store
from scarctl.store.foreign import STORE_FOLDERS
from scarctl.store.format import SETTINGS
from scarctl.store.snapshot import snapshot_names
from scarctl.util.arrays import Bytes, Ids

_WINDOW = 64 << 20
"""Bytes of tensors that are read at a time: a parameter with its slots, some rows of it, or several of them."""


def open_any(name: str, storage_options: Mapping[str, Any] | None = None) -> Source:
    """Open a checkpoint of any kind by its name: a path, or a store's folder or address.

    `STORE@NAME` is a snapshot of a store. `STORE@STEP` is its newest sealed state of that step, unless a snapshot has
    that name. A path that exists is never split at `@`.

    Raises UsageError, NoStore, NoIntactCopy, Corruption, AccessDenied, Unavailable.
    """
    if is_store(name):
        return StoreSource(Store.open(name, storage_options=storage_options))
    store, at, state = name.rpartition("@")
    if at and "/" not in state and not os.path.lexists(name) and is_store(store):
        return StoreSource(Store.open(store, storage_options=storage_options), state)
    return open_source(Path(name))


def is_store(name: str) -> bool:
    """Return whether a path or address means a store: an address always does, unless it has `@` after its last `/`.

    A store that has lost its settings is one, too.
    """
    if "://" in name:
        return "@" not in name.rpartition("/")[2]
    return os.path.lexists(os.path.join(name, SETTINGS)) or all(
        os.path.isdir(os.path.join(name, folder)) for folder in STORE_FOLDERS
    )


class StoreSource:
    """The tensors of a state in a store, optimizer slots included. See `scarctl.formats.source.Source`."""

    format = "store"

    def __init__(self, store: Store, of: str = "") -> None:
        """Plan to read the newest copies, or those of the snapshot or sealed step `of`."""
        self.where = f"{store.url}@{of}" if of else store.url
        self.problems: list[str] = []
        self._plan = _plan(store, of)
        self.step = self._plan.step
        """Step of all copies; None when steps are mixed."""
        if self._plan.degraded:
            self.problems.append(
                f"{self.where}: the newest copy of something is damaged, and an older one is read"
            )
        layouts = self._plan.state.layouts
        specs, self._targets = content(layouts, self._plan.state.everything())
        self.specs: Mapping[str, TensorSpec] = dict(sorted(specs.items()))
        self._wholes = whole_groups(layouts)
        self._group_of = {
            group.key(t): (name, t) for name, group in self._wholes.items() for t in _all(group)
        }
        self._names = sorted(self._wholes)
        self._number = {name: i for i, name in enumerate(self._names)}
        self._places: dict[str, list[tuple[int, int]]] = {}
        for k, layout in enumerate(layouts):
            for g, group in enumerate(layout.groups):
                self._places.setdefault(group.name, []).append((k, g))
        self._window = _Window({}, 0, 0)

    def read(self, name: str, start: int, stop: int) -> Bytes:
        """See `Source`."""
        if not self._window.has(name, start, stop):
            of, t = self._group_of[name]
            whole = self._wholes[of]
            if whole.nbytes <= _WINDOW:
                names, size = [of], whole.nbytes
                for other in islice(self._names, self._number[of] + 1, None):
                    size += self._wholes[other].nbytes
                    if size > _WINDOW:
                        break
                    names.append(other)
                self._load(names, 0, max(self._wholes[one].rows for one in names))
            else:
                row_bytes = whole.tensors[t].row_bytes
                first = start // row_bytes
                count = max(_WINDOW // whole.row_bytes, -(-stop // row_bytes) - first)
                self._load([of], first, min(first + count, whole.rows))
        return self._window.take(name, start, stop)

    def _load(self, names: Sequence[str], first: int, stop: int) -> None:
        """Read rows `[first, stop)` of some groups, as far as they have them."""
        self._window = _Window({}, 0, 0)  # free its memory before more is allocated
        self._window = window = _Window({name: self._wholes[name] for name in names}, first, stop)
        plans: list[Plan | None] = []
        for k, plan in enumerate(self._plan.plans):
            layout, mine = (
                self._plan.state.layouts[k],
                [g for n in names for of, g in self._places[n] if of == k],
            )
            found = [_overlapping(layout, g, first, stop) for g in mine]
            ids = np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)
            plans.append(None if plan is None else _part(plan, ids))
        nothing = [None] * len(plans)
        sinks = [
            FileSink(layout, targets, window)
            for layout, targets in zip(self._plan.state.layouts, self._targets, strict=True)
        ]
        report = execute_shared(replace(self._plan, plans=tuple(plans)), nothing, sinks)
        self.problems += [problem for problem in report.problems if problem not in self.problems]


class _Window:
    """Some rows of whole tensors in memory. A writer for `FileSink`, which ignores other rows."""

    def __init__(self, groups: Mapping[str, Group], first: int, stop: int) -> None:
        self._data: dict[str, tuple[int, Bytes]] = {}
        for group in groups.values():
            for t, spec in enumerate(group.tensors):
                rows = max(0, min(stop, spec.rows) - first)
                self._data[group.key(t)] = (
                    first * spec.row_bytes,
                    np.zeros(rows * spec.row_bytes, dtype=np.uint8),
                )

    def has(self, name: str, start: int, stop: int) -> bool:
        """Return whether bytes `[start, stop)` of a tensor are here."""
        base, data = self._data.get(name, (0, None))
        return data is not None and base <= start and stop <= base + len(data)

    def take(self, name: str, start: int, stop: int) -> Bytes:
        """Return bytes `[start, stop)` of a tensor."""
        base, data = self._data[name]
        return data[start - base : stop - base]

    def write(self, name: str, rows: Rows, data: Bytes) -> None:
        """See `scarctl.formats.state_writer.StateWriter`."""
        base, into = self._data[name]
        wide = data.shape[1]
        into = into.reshape(-1, wide)
        first = base // wide
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        inside = (numbers >= first) & (numbers < first + len(into))
        into[numbers[inside] - first] = data[inside]


def _plan(store: Store, of: str) -> SharedPlan:
    """Return the plan of everything in the newest copies, or in the snapshot or sealed step `of`."""
    sealed = of.isdecimal() and of not in snapshot_names(store)
    snapshot = named_snapshot(store, of) if of and not sealed else None
    state = open_shares(store, snapshot)
    check_complete(state.layouts)
    nothing = [None] * len(state.shares)
    if snapshot is not None:
        return next(plans_back(state, nothing, 0, snapshot))
    return _sealed_at(state, int(of)) if sealed else plan_lost(state, state.everything(), nothing)


def _sealed_at(state: SharedState, step: int) -> SharedPlan:
    known = []
    for plan in plans_back(state, [None] * len(state.shares), 0, None):
        if plan.step == step:
            return replace(plan, degraded=False)
        known.append(str(plan.step))
    raise NoIntactCopy(
        f"{state.store.where}: the store has no sealed state of step {step}",
        hint=f"sealed steps: {', '.join(known[:20]) or 'none'}; `scarctl inspect` lists snapshots",
        kind="no-sealed-state",
    )


def _all(group: Group) -> range:
    return range(len(group.tensors))


def _overlapping(layout: Layout, g: int, first: int, stop: int) -> Ids:
    """Return the partitions of a group with some of the whole tensor's rows `[first, stop)`."""
    group = layout.groups[g]
    low = max(0, first - group.first_row) // group.rows_per_partition
    high = -(-max(0, min(stop - group.first_row, group.rows)) // group.rows_per_partition)
    return int(layout.base[g]) + np.arange(low, min(high, group.partitions), dtype=np.int64)


def _part(plan: Plan, ids: Ids) -> Plan:
    """Return the plan of some of its partitions. The plan has all partitions of the layout."""
    return replace(plan, ids=ids, tier=plan.tier[ids], version=plan.version[ids], lost=len(ids))
