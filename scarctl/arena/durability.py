"""Count an arena's durable copies: the figures that a session's metrics and the daemon's status share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.state.version import NEVER, step_of


@dataclass(frozen=True, slots=True)
class Durability:
    """The durable and pending copies of one arena. Steps are -1 before the first."""

    versions: NDArray[np.int64]
    """Newest durable version of each partition: int64 of shape (partitions,), -1 without a durable copy."""
    durable_step: int
    """The newest step among these versions."""
    oldest_durable_step: int
    sealed_step: int
    """Step of the newest durable sealed checkpoint."""
    pending_partitions: int
    """Partitions whose copies wait for the store."""
    pending_bytes: int


def durability(arena: Arena) -> Durability:
    """Return the figures of an arena. Another process may write to it meanwhile."""
    pending = arena.pending()
    # Sealing found all durable copies equal to the live values of the sealed step.
    versions = np.where(arena.durable >= 0, np.maximum(arena.durable, arena.sealed), np.int64(NEVER))
    return Durability(
        versions,
        step_of(int(versions.max(initial=NEVER))),
        step_of(int(versions.min(initial=versions.max(initial=NEVER)))),
        step_of(arena.sealed),
        int(pending.sum()),
        int(arena.layout.partition_bytes[pending].sum()),
    )
