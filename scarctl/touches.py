"""In how many steps each row of a table got a gradient since it was saved.

This is the score "most frequently used" of Maeng et al., "CPR: Understanding and Improving Failure Tolerant Training for
Deep Learning Recommendation with Partial Recovery" (MLSys 2021). Counts lie where the gradients are, so that to count
waits for no device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.group import Group

Ids = NDArray[np.int64]
_ALL = 0.5
"""A table of which a step touches a larger share of the rows is no table that counts tell anything about."""


class Touches:
    """Counts of one group. The training thread adds; the copy thread, which it waits for first, reads and resets."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._counts = torch.zeros(group.rows, dtype=torch.int32, device=device)
        self._steps = 0
        self._rows: int | torch.Tensor = 0

    def add(self, rows: torch.Tensor) -> None:
        """One step's rows: a mask, bool of shape (rows,), or numbers, int64, that may repeat: they count once."""
        self._steps += 1
        if rows.dtype == torch.bool:
            self._counts += rows
            self._rows = self._rows + rows.sum()
        else:
            # Rows that are repeated get the same value several times.
            self._counts[rows] = self._counts[rows] + 1
            self._rows = self._rows + min(rows.numel(), self._group.rows)

    def busy(self) -> bool:
        """Whether the steps since it was last asked have touched most rows."""
        rows, steps = int(self._rows), self._steps
        self._rows = self._steps = 0
        return rows > _ALL * steps * self._group.rows

    def counts(self) -> NDArray[np.int32]:
        """Touches of every partition, summed over its rows: int32 of shape (partitions,). Not to be written to."""
        rows = self._counts.cpu().numpy()
        per_partition = self._group.rows_per_partition
        if per_partition == 1:
            return rows
        starts = np.arange(0, self._group.rows, per_partition)
        return np.add.reduceat(rows, starts, dtype=np.int32)

    def reset(self, ids: Ids | None = None) -> None:
        """Partitions `ids` of the group (None: all) are saved."""
        if ids is None:
            self._counts.zero_()
        else:
            self._counts[self._rows_of(ids)] = 0

    def spoiled(self, ids: Ids) -> None:
        """Partitions `ids` of the group have no good copy: they count as touched."""
        rows = self._rows_of(ids)
        self._counts[rows] = torch.clamp(self._counts[rows], min=1)

    def _rows_of(self, ids: Ids) -> torch.Tensor:
        per_partition = self._group.rows_per_partition
        rows = (ids[:, None] * per_partition + np.arange(per_partition)).reshape(-1)
        return torch.from_numpy(rows[rows < self._group.rows]).to(self._counts.device)
