"""Choose the rows of embedding tables that a checkpoint saves as earlier systems do: by lookups, not by change.

CPR (Maeng et al., "Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with Partial
Recovery", MLSys 2021, arXiv:2011.02999) saves a part of the rows at a time: those used most often since they were last
saved (MFU), or a sample of those used (SSU). Check-N-Run (Eisenman et al., NSDI 2022, arXiv:2010.08679) saves all rows
that were used since the last full checkpoint, and stores them in fewer bits. Only the choice is built here. Rows are
numbered over all tables, so all of them compete for the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Choice(Protocol):
    """Which rows to save."""

    def note(self, rows: Ids) -> None:
        """Learn which rows an iteration has looked up, as often as it did."""

    def choose(self, room: int) -> Ids:
        """Return the rows to save now, ascending. room: number of rows that fit; Check-N-Run has no such limit."""


class MostUsed:
    """CPR-MFU: a counter for every row, which is cleared when the row is saved."""

    def __init__(self, rows: int) -> None:
        self._counts = torch.zeros(rows, dtype=torch.int32)

    def note(self, rows: Ids) -> None:
        ids = torch.from_numpy(rows)
        self._counts.index_add_(0, ids, torch.ones(1, dtype=torch.int32).expand(len(rows)))

    def choose(self, room: int) -> Ids:
        counts = self._counts.numpy()
        found = np.flatnonzero(counts)
        if found.size > room:
            found = np.sort(found[np.argpartition(counts[found], found.size - room)[found.size - room :]])
        counts[found] = 0
        return found


class SubSampled:
    """CPR-SSU: a list of as many rows as are saved at a time, of every second lookup. A full one forgets at random."""

    PERIOD = 2

    def __init__(self, rows: int, room: int, seed: int = 0) -> None:
        self._is_listed = np.zeros(rows, dtype=np.bool_)
        self._list = np.empty(room, dtype=np.int64)
        self._count = 0
        self._random = np.random.default_rng(seed)

    def note(self, rows: Ids) -> None:
        seen = rows[:: self.PERIOD]
        new = np.unique(seen[~self._is_listed[seen]])[: self._list.size]
        added = min(new.size, self._list.size - self._count)
        at = np.arange(self._count, self._count + added)
        if added < new.size:
            forgotten = self._random.choice(self._count, new.size - added, replace=False)
            self._is_listed[self._list[forgotten]] = False
            at = np.concatenate([at, forgotten])
        self._count += added
        self._list[at] = new
        self._is_listed[new] = True

    def choose(self, room: int) -> Ids:
        found = np.sort(self._list[: min(room, self._count)])
        self._is_listed[self._list[: self._count]] = False
        self._count = 0
        return found


class SinceFull:
    """Check-N-Run: a bit for every row, which is cleared by a full checkpoint."""

    def __init__(self, rows: int) -> None:
        self._is_used = np.zeros(rows, dtype=np.bool_)
        self._sizes: list[float] = []
        """Sizes of the checkpoints since the last full one, relative to that."""

    def note(self, rows: Ids) -> None:
        self._is_used[rows] = True

    def choose(self, room: int = 0) -> Ids:
        return np.flatnonzero(self._is_used)

    def is_full_cheaper(self, rows: int) -> bool:
        """Return whether a full checkpoint and increments as before take fewer bytes than increments of this size.

        The paper's "intermittent" form of increments.
        """
        return 1 + sum(self._sizes) <= (len(self._sizes) + 1) * rows / self._is_used.size

    def saved(self, rows: int) -> None:
        """Note that an increment of so many rows was saved."""
        self._sizes.append(rows / self._is_used.size)

    def saved_all(self) -> None:
        """Note that a full checkpoint was saved."""
        self._is_used[:] = False
        self._sizes.clear()


def in_8_bits(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, uint8 (rows, columns), and the least value and the step of each row, float32 (rows, 2).

    Check-N-Run's asymmetric quantization without a search for better bounds.
    """
    least, most = weights.aminmax(dim=1, keepdim=True)
    step = (most - least).clamp_min(1e-30) / 255
    codes = ((weights - least) / step).round_().to(torch.uint8)
    return codes, torch.cat([least, step], dim=1)


def from_8_bits(codes: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the weights that codes stand for, float32 of shape (rows, columns)."""
    return codes.float() * bounds[:, 1:] + bounds[:, :1]
