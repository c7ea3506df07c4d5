"""Prepare for a shutdown of the host: how far pending copies are from the store's, and which a seal hands over."""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.util.arrays import Ids, union


class Leaving:
    """One session's notes for an evacuation (`scarctl.persist.evacuation`).

    unsaved: distance of each pending copy from the store's, an upper bound; NaN if unknown: float32 (partitions,).
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._until = -math.inf
        self.unsaved = np.zeros(arena.layout.partitions, dtype=np.float32)
        self.unsaved[arena.pending()] = np.nan

    def begin(self, deadline: float) -> None:
        """Note that the host shuts down at `deadline`, on the monotonic clock. Partial checkpoints pause until then."""
        self._until = deadline

    @property
    def now(self) -> bool:
        """Whether the host is about to shut down."""
        return time.monotonic() < self._until

    def eligible(self, may: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which partitions a partial checkpoint copies: those of `may`; none before a shutdown."""
        return may & (not self.now)

    def copying(self, ids: Ids, distance: NDArray[np.float64]) -> None:
        """Note that these partitions are about to be copied, at these distances from their present copies."""
        durable = self._arena.durable[ids] == self._arena.version[ids]
        with np.errstate(over="ignore"):
            lacking = np.sqrt(np.maximum(self._arena.encoding_error[ids], 0.0))
            self.unsaved[ids] = np.where(durable, lacking, self.unsaved[ids]) + distance

    def gather(self, copied: Ids, nonfinite: Ids, version: int) -> Ids:
        """Return the partitions that a seal hands over, ascending: those copied; before a shutdown all pending ones.

        The seal has found that the latter equal the live values. So they now count as copies of the seal's version, and
        all can be saved in any order.
        """
        if not self.now:
            return copied
        arena = self._arena
        older = arena.pending() & arena.intact() & (arena.version < version)
        older[nonfinite] = False
        waiting = np.flatnonzero(older)
        arena.relabel(waiting, version)
        return union(copied, waiting)
