"""Tell how far the lost values of a run were from the copies that a recovery takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.distances import from_memory, from_store
from scarctl.recovery.plan import STORE, Plan


def last_distances(plan: Plan, arena: Arena) -> NDArray[np.float64]:
    """Return the last known distances of the lost values from the copies of `plan`: float64 of the shape of its ids."""
    far = with_errors(from_store(arena), arena.encoding_error)[plan.ids]
    return np.where(plan.tier == STORE, far, from_memory(arena.newest())[plan.ids])


def with_errors(distance: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distances (l2) from the store's copies: float64 (partitions,).

    distance: from the exact ones. error: see `Arena.encoding_error`.
    """
    with np.errstate(over="ignore"):
        return np.where(error > 0, np.sqrt(np.square(distance) + np.maximum(error, 0.0)), distance)
