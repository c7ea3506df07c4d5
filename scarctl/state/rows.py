"""Index the rows of partitions in a tensor: by a slice if they are adjacent, otherwise by an array of row numbers."""

from __future__ import annotations

import numpy as np

from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids


def rows_of(layout: Layout, ids: Ids) -> slice | Ids:
    """Return an index that picks the rows of `ids` (ascending, of one group): a slice if they are adjacent."""
    if len(ids) and ids[-1] - ids[0] == len(ids) - 1:
        starts, stops = layout.row_ranges(ids[[0, -1]])
        return slice(int(starts[0]), int(stops[1]))
    return take_rows(*layout.row_ranges(ids))


def take_rows(starts: Ids, stops: Ids) -> slice | Ids:
    """Return an index that picks the rows of ascending ranges [start, stop): a slice if they are adjacent."""
    if not len(starts) or (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1])) if len(starts) else slice(0, 0)
    lengths = stops - starts
    offsets = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets
