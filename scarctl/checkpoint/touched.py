"""Mark the partitions of a table that got a gradient since they were last compared, and keep the distances of all.

Rows without a gradient do not move, so their distances stay valid, and only touched partitions are compared again.
Maeng et al. (CPR, MLSys 2021) count touches instead and save the most used rows. With Adam a count says little about
how far a row has moved (docs/benchmarks.md), and few rows are touched between two checkpoints.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.state.group import Group
from scarctl.util.arrays import Ids


class Touches:
    """The marks of one group. The training thread sets them; the copy thread, for which it waits, reads and resets.

    Marks are on the gradients' device, one byte per partition, so that setting them never waits for a device.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        """At first all partitions are marked, because no distance is known."""
        self._per_partition = group.rows_per_partition
        self._marks = torch.ones(group.partitions, dtype=torch.bool, device=device)
        self.known: NDArray[np.float64] = np.full(group.partitions, np.nan)
        """Last known distances: float64 of shape (partitions,)."""

    def mark(self, rows: torch.Tensor) -> None:
        """Mark the rows that a step changes: a bool mask (rows,), or int64 row numbers in any order, even repeated."""
        if rows.dtype == torch.bool:
            if self._per_partition == 1:
                self._marks |= rows
                return
            rows = rows.nonzero()[:, 0]
        if self._per_partition > 1:
            rows = torch.div(rows, self._per_partition, rounding_mode="floor")
        self._marks[rows] = True

    def mark_partitions(self, ids: Ids) -> None:
        """Mark partitions `ids` of the group, int64 of shape (n,)."""
        self._marks[torch.from_numpy(ids).to(self._marks.device)] = True

    def marked(self) -> NDArray[np.bool_]:
        """Return which partitions are marked: bool of shape (partitions,). Do not write to it."""
        marks: NDArray[np.bool_] = self._marks.cpu().numpy()
        return marks

    def looked(self) -> None:
        """Remove all marks, because `known` is current for every partition."""
        self._marks.zero_()

    def saved(self, ids: Ids) -> None:
        """Note that partitions `ids` of the group are equal to their copies."""
        self.known[ids] = 0.0
        self._marks[torch.from_numpy(ids).to(self._marks.device)] = False

    def saved_all(self) -> None:
        """Note that all partitions are equal to their copies."""
        self.known[:] = 0.0
        self._marks.zero_()
