"""Mark the partitions of a table whose gradient is sparse: only rows with a gradient change in a step.

The optimizers that take sparse gradients (`SparseAdam`, `SGD` without momentum, `Adagrad`) write to these rows alone.
So a checkpoint in memory compares and copies only marked partitions. It also compares a few hundred of the others: if
one of them has moved, something else writes to the table, and the marks are no longer used.
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
        """At first all partitions are marked, because it is not known how they differ from their copies."""
        self._per_partition = group.rows_per_partition
        self._marks = torch.ones(group.partitions, dtype=torch.bool, device=device)

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

    def clear(self) -> None:
        """Remove all marks: every partition equals its copy."""
        self._marks.zero_()
