"""Tell how far the parameters of a run are from their copies in memory, and from those in the store.

The arena keeps one number for each partition: the distance of its copy in memory from the store's, as the sum of the
movements between the checkpoints in memory since then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.view import ArenaView
from scarctl.util.arrays import Ids


def from_store(arena: Arena | ArenaView) -> NDArray[np.float64]:
    """Return the distance of every copy in memory from the store's, NaN if unknown: float64 of shape (partitions,).

    Where the store has the copy in memory, that is 0. Errors of encoded copies are not included.
    """
    return np.where((arena.moments == arena.saved) & (arena.moments > 0), 0.0, arena.distance)


def from_memory(newest: Ids) -> NDArray[np.float64]:
    """Return the distances of live values, at the newest checkpoint in memory, from their copies there.

    They are 0 where that checkpoint has made or found the copy, and NaN elsewhere: it has left values out that are not
    finite or lost, or the process has died during a copy. newest: see `Arena.newest`.
    """
    return np.where((newest >= 0) & (newest == newest.max(initial=-1)), 0.0, np.nan)


def with_errors(distance: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distances (l2) from the store's copies: float64 (partitions,).

    distance: from the exact ones. error: see `Arena.encoding_error`.
    """
    with np.errstate(over="ignore"):
        return np.where(error > 0, np.sqrt(np.square(distance) + np.maximum(error, 0.0)), distance)
