"""Speed up the common simple cases of operations on long arrays of partition ids."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
"""Numbers of partitions, or others as large, int64."""
Bytes: TypeAlias = NDArray[np.uint8]
"""Raw bytes, uint8."""

Integer = TypeVar("Integer", bound=np.integer)


def distinct(values: NDArray[Integer]) -> NDArray[Integer]:
    """Return the distinct values of a one-dimensional array, ascending. Fast if all are equal, the common case."""
    if not values.size or (values[0] == values[-1] and bool((values == values[0]).all())):
        return values[:1]
    # The first call of numpy's own function imports its masked arrays, which takes longer than many a resume.
    ordered = np.sort(values)
    first = np.ones(ordered.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def union(first: Ids, second: Ids) -> Ids:
    """Return the ids in either of two arrays of ascending, distinct ids: ascending and distinct, without a copy if one
    is empty.
    """
    if not first.size or not second.size:
        return first if first.size else second
    return distinct(np.concatenate([first, second]))


def adjacent(at: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return ascending indices, as a slice when they are adjacent: numpy then copies instead of gathering."""
    if at.size and at[-1] - at[0] == at.size - 1:
        return slice(int(at[0]), int(at[-1]) + 1)
    return at


def places(among: NDArray[np.int64], ids: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return the indices of `ids` in `among`, which contains them; both ascend. A slice if they are adjacent there."""
    if not ids.size:
        return slice(0, 0)
    first, last = np.searchsorted(among, ids[[0, -1]]).tolist()
    if last - first == ids.size - 1:
        return slice(first, last + 1)
    return np.searchsorted(among, ids)


def take_rows(starts: Ids, stops: Ids) -> slice | Ids:
    """Return an index that picks the rows of ascending ranges [start, stop): a slice if they are adjacent."""
    if not len(starts) or (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1])) if len(starts) else slice(0, 0)
    lengths = stops - starts
    offsets = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets
