"""Decide which partitions of a partial checkpoint are stored in fewer bits, and weigh what their stored copies lack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.checkpoint.distance import values_of
from scarctl.config import Norm
from scarctl.policy.select import squared
from scarctl.state.encoding import stored_as
from scarctl.state.encodings import Encoding
from scarctl.util.arrays import Ids

_LEAST, _MOST = 1e-300, 1e300


@dataclass(frozen=True, slots=True)
class Weighed:
    """Every partition as a candidate of one checkpoint. Arrays of shape (partitions,)."""

    distance_sq: NDArray[np.float64]
    """Squared distance of the live values from the store's copy."""
    nbytes: Ids
    """Bytes that a copy takes in the store."""
    exact: NDArray[np.bool_] | None
    """Which are stored exactly; None: all."""


class EncodedCopies:
    """Weighs the partitions of one session.

    A live value differs from the store's copy by its movement since the copy was made, and by the error of the
    encoding. The two are independent, so their squares add up. Once a partition has moved by no more than the error,
    its next copy is exact: fewer bits would leave as much as they save.
    """

    def __init__(self, arena: Arena, encoding: Encoding, norm: Norm) -> None:
        """Raises UsageError if a tensor has the name of a scale."""
        self.encoding: Encoding = encoding
        layout = arena.layout
        self._arena = arena
        self._exact_bytes = layout.partition_bytes
        self.nbytes: Ids = stored_as(layout, encoding).partition_bytes
        """Bytes of each partition's encoded copy: int64 (partitions,)."""
        self._unit: NDArray[np.float64] | float = 1.0 if norm == "l2" else 0.0
        """Factor from a squared error to the session's norm. With norms that depend on values errors do not count."""
        if norm == "rms":
            self._unit = 1 / np.concatenate([values_of(group)[: group.partitions] for group in layout.groups])

    def weigh(self, distance: NDArray[np.float64]) -> Weighed:
        """Return the candidates. distance: of live values from the arena's copies, in the session's norm."""
        moved, error = squared(distance), self._arena.encoding_error
        lossy = error >= 0
        if not lossy.any():
            exact = None if self.encoding == "exact" else lossy
            return Weighed(moved, self.nbytes, exact)
        lacking = np.where(lossy, np.minimum(error, _MOST) * self._unit, 0.0)
        near = lossy & (moved <= lacking)
        total = moved + lacking
        total[lossy & (total == 0)] = _LEAST  # it no longer changes, but its slots may not be exact yet
        return Weighed(total, np.where(near, self._exact_bytes, self.nbytes), near)
