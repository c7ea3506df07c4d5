"""Where recovery puts partitions: an arena, a survivors' state file, a new file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from scarctl.arrays import distinct
from scarctl.daemon.arena import Arena
from scarctl.errors import LayoutMismatch
from scarctl.layout import Layout, TensorSpec
from scarctl.recovery import Ids, rows_of, take_rows
from scarctl.statefile import StateFile
from scarctl.statewriter import StateWriter
from scarctl.values import squared_changes

Bytes = NDArray[np.uint8]


class ArenaSink:
    """Writes into an arena under the generation protocol. What is written is durable: the store has it."""

    def __init__(self, arena: Arena) -> None:
        self.arena: Arena | None = arena
        self._arena = arena

    def overwrites(self, ids: Ids, versions: Ids) -> bool:
        """Whether the arena has a newer intact copy of any of them."""
        return bool((self._arena.intact()[ids] & (self._arena.newest()[ids] > versions)).any())

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]) -> None:
        """Write partitions and their versions; how far the live values are from them is unknown then."""
        arena = self._arena
        rows = rows_of(arena.layout, ids)
        if (versions < arena.sealed).any():
            arena.unseal()
        arena.begin(ids)
        for t, data in enumerate(tensors):
            arena.rows(group, t)[rows] = data
        found = distinct(versions).tolist()
        for version in found:
            of_version = ids[versions == version] if len(found) > 1 else ids
            arena.end(of_version, version)
            arena.acknowledge(of_version, version)
        arena.distance[ids] = np.nan


class PatchSink:
    """Writes rows into a survivors' state file, and measures by how much its parameters change.

    A file without any of the optimizer's slots is patched without them: `left_out` names them.
    """

    arena: Arena | None = None

    def __init__(self, layout: Layout, ids: Ids, state: StateFile, writer: StateWriter) -> None:
        """Raises LayoutMismatch when the file lacks a tensor of `ids`, or when one differs."""
        self._layout = layout
        self._state = state
        self._writer = writer
        self.left_out = check_fits(layout, ids, state)

    def overwrites(self, ids: Ids, versions: Ids) -> bool:
        """No: the file changes when it is renamed."""
        return False

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]) -> NDArray[np.float64]:
        """Write partitions; returns the squared change of their parameter, NaN where it is not finite."""
        of = self._layout.groups[group]
        starts, stops = self._layout.row_ranges(ids)
        rows = take_rows(starts, stops)
        before = self._state.rows(of.name)[rows]
        changes = squared_changes(before, tensors[0], of.tensors[0].dtype, stops - starts)
        for t, data in enumerate(tensors):
            if of.key(t) not in self.left_out:
                self._writer.write(of.key(t), rows, data)
        return changes


class FileSink:
    """Writes into a new file: whole tensors where every row is restored, else runs `name[start:stop]`."""

    arena: Arena | None = None

    def __init__(self, layout: Layout, writer: StateWriter, runs: Mapping[int, tuple[Ids, Ids]]) -> None:
        self._layout = layout
        self._writer = writer
        self._runs = runs

    def overwrites(self, ids: Ids, versions: Ids) -> bool:
        """No: the file appears when it is whole."""
        return False

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]) -> None:
        """Write partitions."""
        of = self._layout.groups[group]
        starts, stops = self._layout.row_ranges(ids)
        run_starts, run_stops = self._runs[group]
        run = np.searchsorted(run_starts, starts, side="right") - 1
        first = 0
        for k in np.unique(run).tolist():
            mine = run == k
            begin, end = int(run_starts[k]), int(run_stops[k])
            rows = take_rows(starts[mine] - begin, stops[mine] - begin)
            count = int((stops[mine] - starts[mine]).sum())
            for t, data in enumerate(tensors):
                name = _piece_name(of.key(t), begin, end, of.rows)
                self._writer.write(name, rows, data[first : first + count])
            first += count


def file_content(layout: Layout, ids: Ids) -> tuple[dict[str, TensorSpec], dict[int, tuple[Ids, Ids]]]:
    """Tensors of a file with the partitions `ids` (ascending), and per group its runs of rows: starts, stops.

    Tensors without rows belong to a file with everything.
    """
    specs: dict[str, TensorSpec] = {}
    runs: dict[int, tuple[Ids, Ids]] = {}
    bounds = np.searchsorted(ids, layout.base)
    for g, group in enumerate(layout.groups):
        starts, stops = layout.row_ranges(ids[bounds[g] : bounds[g + 1]])
        if not len(starts):
            if len(ids) == layout.partitions:
                specs |= {group.key(t): _named(spec, spec.shape) for t, spec in enumerate(group.tensors)}
            continue
        breaks = np.flatnonzero(starts[1:] != stops[:-1])
        runs[g] = starts[np.concatenate(([0], breaks + 1))], stops[np.append(breaks, len(stops) - 1)]
        for begin, end in zip(runs[g][0].tolist(), runs[g][1].tolist(), strict=True):
            for t, spec in enumerate(group.tensors):
                shape = (end - begin, *spec.shape[1:]) if spec.shape else ()
                specs[_piece_name(group.key(t), begin, end, group.rows)] = _named(spec, shape)
    return specs, runs


def check_fits(layout: Layout, ids: Ids, state: StateFile) -> frozenset[str]:
    """Optimizer slots of the groups of `ids` that the file does not have, when it has none of any group.

    Raises LayoutMismatch listing what differs otherwise.
    """
    groups = [layout.groups[g] for g in np.unique(layout.group_of(ids)).tolist()]
    slots = {group.key(t) for group in groups for t in range(1, len(group.tensors))}
    left_out = frozenset(slots) if slots and not slots & state.specs.keys() else frozenset()
    lines = []
    for group in groups:
        for t, spec in enumerate(group.tensors):
            key, found = group.key(t), state.specs.get(group.key(t))
            if found is None:
                if key not in left_out:
                    lines.append(f"tensor {key!r} is missing")
            elif (found.dtype, found.shape) != (spec.dtype, spec.shape):
                lines.append(
                    f"tensor {key!r} is {found.dtype}{list(found.shape)}, not {spec.dtype}{list(spec.shape)}"
                )
    if lines:
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise LayoutMismatch(
            f"{state.path} does not fit the store: {'; '.join(lines[:5])}{more}",
            hint="give the state file of the same model; it was not changed",
        )
    return left_out


def _piece_name(key: str, begin: int, end: int, rows: int) -> str:
    return key if (begin, end) == (0, rows) else f"{key}[{begin}:{end}]"


def _named(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec("", spec.dtype, shape)
