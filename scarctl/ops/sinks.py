"""Write restored partitions of a share into a new file, or into the state file of the survivors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.errors import LayoutMismatch
from scarctl.formats.state_file import StateFile
from scarctl.formats.state_writer import Rows
from scarctl.ops.assemble import Plan, units
from scarctl.recovery.execute import Sink
from scarctl.state.group import Group
from scarctl.state.layout import Layout
from scarctl.state.values import squared_changes
from scarctl.util.arrays import Bytes, Ids, take_rows


class RowWriter(Protocol):
    """A writer of rows of tensors, such as `StateWriter`."""

    def write(self, name: str, rows: Rows, data: Bytes) -> None: ...


class FileSink:
    """Write a share's partitions into a new file, which appears when it is complete. See `recovery.execute.Sink`."""

    arena: Arena | None = None

    def __init__(
        self, layout: Layout, plan: Plan, writer: RowWriter, left_out: frozenset[str] = frozenset()
    ) -> None:
        """Write by `plan`. left_out: tensors that the file does not have."""
        self._layout = layout
        self._plan = plan
        self._writer = writer
        self._left_out = left_out

    def room(self, group: int, ids: Ids) -> None:
        """Return None: there is no memory of it to read into."""

    def put(
        self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]
    ) -> NDArray[np.float64] | None:
        """Write partitions."""
        of, runs = self._layout.groups[group], self._plan[group]
        starts, stops = self._layout.row_ranges(ids)
        run = np.searchsorted(runs.starts, starts, side="right") - 1
        first = 0
        for k in np.unique(run).tolist():
            mine = run == k
            rows = take_rows(starts[mine], stops[mine])
            count = int((stops[mine] - starts[mine]).sum())
            for t, data in enumerate(tensors):
                key = runs.targets[k].key(of, t)
                if key not in self._left_out:
                    where, wide = units(of, t, rows, runs.targets[k])
                    if wide:
                        self._writer.write(key, where, data[first : first + count].reshape(-1, wide))
            first += count
        return None


class PatchSink(FileSink):
    """Write a share's partitions into the survivors' state file, and measure the change of its parameters."""

    def __init__(
        self, layout: Layout, plan: Plan, writer: RowWriter, state: StateFile, left_out: frozenset[str]
    ) -> None:
        """Write by `plan`, from `assemble.onto`. The file has these tensors, except `left_out`."""
        super().__init__(layout, plan, writer, left_out)
        self._state = state

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]) -> NDArray[np.float64]:
        """Write partitions. Return the squared change of each parameter, NaN if it is not finite."""
        of = self._layout.groups[group]
        starts, stops = self._layout.row_ranges(ids)
        rows = take_rows(starts, stops)
        where, wide = units(of, 0, rows, self._plan[group].targets[0])
        before = tensors[0]
        if wide:
            before = self._state.rows(of.name).reshape(-1, wide)[where].reshape(before.shape)
        changes = squared_changes(before, tensors[0], of.tensors[0].dtype, stops - starts)
        super().put(group, ids, versions, tensors)
        return changes


class _Counting:
    """Pass partitions on to a sink, and report their bytes."""

    def __init__(self, sink: Sink, report: Callable[[int], None]) -> None:
        self._sink, self._report = sink, report
        self.arena = sink.arena
        self.room = sink.room

    def put(
        self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]
    ) -> NDArray[np.float64] | None:
        """Write partitions."""
        changes = self._sink.put(group, ids, versions, tensors)
        self._report(sum(data.nbytes for data in tensors))
        return changes


def counting(
    sinks: Sequence[Sink], total: int, progress: Callable[[int, int], None] | None
) -> Sequence[Sink]:
    """Return sinks that also call `progress` with the bytes written so far, and `total`; the same without it."""
    if progress is None:
        return sinks
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return [_Counting(sink, add) for sink in sinks]


def check_fits(groups: Iterable[Group], state: StateFile) -> frozenset[str]:
    """Return the optimizer slots of whole `groups` that the file does not have, if it has none of any group.

    Otherwise raises LayoutMismatch, which lists the differences.
    """
    groups = list(groups)
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
            hint="use a state file of the same model; this one was not changed",
        )
    return left_out
