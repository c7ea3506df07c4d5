"""Index the rows of partitions in a tensor: by a slice if they are adjacent, otherwise by an array of row numbers."""

from __future__ import annotations

import numpy as np

from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids


def rows_of(layout: Layout, g: int, ids: Ids) -> slice | Ids:
    """Return an index that picks the rows of `ids` (ascending, of group `g`): a slice if they are adjacent."""
    if len(ids):
        first, last = int(ids[0]), int(ids[-1])
        if last - first == len(ids) - 1:  # without arrays: a restore asks for thousands of single partitions
            group, base = layout.groups[g], int(layout.base[g])
            step = group.rows_per_partition
            return slice((first - base) * step, min((last - base + 1) * step, group.rows))
    return take_rows(*layout.row_ranges(ids))


def take_rows(starts: Ids, stops: Ids) -> slice | Ids:
    """Return an index that picks the rows of ascending ranges [start, stop): a slice if they are adjacent."""
    if not len(starts) or (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1])) if len(starts) else slice(0, 0)
    lengths = stops - starts
    offsets = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets
