"""Number the partitions of several layouts consecutively, to view the state of all ranks as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from scarctl.state.group import Group
from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids


class Layouts:
    """The layouts of all ranks, in order: the ids of partitions and groups continue from rank to rank."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = tuple(layouts)
        self._base = np.cumsum([0, *(layout.partitions for layout in layouts)])
        self._groups_base = np.cumsum([0, *(len(layout.groups) for layout in layouts)])
        self.groups: tuple[Group, ...] = tuple(group for layout in layouts for group in layout.groups)
        self.partitions = int(self._base[-1])
        self.nbytes = sum(layout.nbytes for layout in layouts)
        sizes = [layout.partition_bytes for layout in layouts]
        self.partition_bytes: Ids = np.concatenate(sizes) if len(sizes) != 1 else sizes[0]
        """Bytes of every partition: int64 of shape (partitions,)."""

    def group_of(self, ids: Ids) -> Ids:
        """Return the index in `groups` of every partition's group: int64 of the shape of `ids`."""
        found = np.empty_like(ids)
        for n, mine in self._by_layout(ids):
            found[mine] = self._layouts[n].group_of(ids[mine] - self._base[n]) + self._groups_base[n]
        return found

    def row_ranges(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the first row and the last row + 1 of every partition in the whole tensor: int64, shaped as `ids`."""
        starts, stops = np.empty_like(ids), np.empty_like(ids)
        for n, mine in self._by_layout(ids):
            starts[mine], stops[mine] = self._layouts[n].row_ranges(ids[mine] - self._base[n])
        first = np.array([group.first_row for group in self.groups], dtype=np.int64)[self.group_of(ids)]
        return starts + first, stops + first

    def _by_layout(self, ids: Ids) -> Iterator[tuple[int, slice | NDArray[np.bool_]]]:
        """Yield every layout to which some of `ids` belong, and an index of those ids."""
        if len(self._layouts) == 1:
            yield 0, slice(None)
            return
        of = np.searchsorted(self._base, ids, side="right") - 1
        for n in range(len(self._layouts)):
            if (mine := of == n).any():
                yield n, mine


def parameters_of(layout: Layout | Layouts) -> NDArray[np.bool_]:
    """Mark the partitions of parameters: bool of shape (layout.partitions,)."""
    kinds = np.array([group.kind == "parameter" for group in layout.groups], dtype=bool)
    return kinds[layout.group_of(np.arange(layout.partitions))]
