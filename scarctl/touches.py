"""Which partitions of a table got a gradient since they were last looked at, and how far each had moved by then.

What gets no gradient does not move, so its distance is what it was: only touched partitions are compared again. Maeng
et al. (CPR, MLSys 2021) count touches instead and save the rows that are used most. With Adam a count says little about
how far a row has moved (docs/benchmarks.md), and the rows that were touched between two checkpoints are few.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.group import Group

Ids = NDArray[np.int64]


class Touches:
    """Of one group. The training thread marks; the copy thread, which it waits for first, reads and resets.

    Marks lie where the gradients are, one byte per partition, so that to mark waits for no device.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        """Nothing is known yet: all partitions are marked."""
        self._per_partition = group.rows_per_partition
        self._marks = torch.ones(group.partitions, dtype=torch.bool, device=device)
        self.known: NDArray[np.float64] = np.full(group.partitions, np.nan)
        """Distances as they were last seen, float64 of shape (partitions,)."""

    def mark(self, rows: torch.Tensor) -> None:
        """Rows that a step changes: a mask, bool of shape (rows,), or numbers, int64, in any order, repeated or not."""
        if rows.dtype == torch.bool:
            if self._per_partition == 1:
                self._marks |= rows
                return
            rows = rows.nonzero()[:, 0]
        if self._per_partition > 1:
            rows = torch.div(rows, self._per_partition, rounding_mode="floor")
        self._marks[rows] = True

    def mark_partitions(self, ids: Ids) -> None:
        """Partitions `ids` of the group have to be looked at again."""
        self._marks[torch.from_numpy(ids).to(self._marks.device)] = True

    def marked(self) -> NDArray[np.bool_]:
        """Which partitions are marked: bool of shape (partitions,). Not to be written to."""
        marks: NDArray[np.bool_] = self._marks.cpu().numpy()
        return marks

    def looked(self) -> None:
        """`known` is of now, for all of them."""
        self._marks.zero_()

    def saved(self, ids: Ids) -> None:
        """Partitions `ids` of the group are equal to their copies."""
        self.known[ids] = 0.0
        self._marks[torch.from_numpy(ids).to(self._marks.device)] = False

    def saved_all(self) -> None:
        """All are equal to their copies."""
        self.known[:] = 0.0
        self._marks.zero_()
