"""Arrays of partitions, a million long: what is mostly simple is found without hashing and searching all of it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Integer = TypeVar("Integer", bound=np.integer)


def distinct(values: NDArray[Integer]) -> NDArray[Integer]:
    """The different ones of `values` (one dimension), ascending. Mostly there is one."""
    if values.size and values[0] == values[-1] and bool((values == values[0]).all()):
        return values[:1]
    return np.unique(values)


def adjacent(at: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Ascending places, as a slice when they are adjacent: numpy then copies instead of looking up each."""
    if at.size and at[-1] - at[0] == at.size - 1:
        return slice(int(at[0]), int(at[-1]) + 1)
    return at


def places(among: NDArray[np.int64], ids: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Where `ids` stand in `among`, which has all of them; both ascending. A slice when they are adjacent there."""
    if not ids.size:
        return slice(0, 0)
    first, last = np.searchsorted(among, ids[[0, -1]]).tolist()
    if last - first == ids.size - 1:
        return slice(first, last + 1)
    return np.searchsorted(among, ids)
