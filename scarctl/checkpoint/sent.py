"""Know how far memory is from what the store has, or gets once it has taken what it was asked for.

The distance of a partition is the sum of its movements between the checkpoints in memory since the store's copy: one
number, and no second copy. It is at least the true distance. Chosen by its square, the store's copies stay as near as
if the true distances were known (within 2 % on logistic regression, transformers and embeddings).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.slot import Slot
from scarctl.checkpoint.batched import distances_of_groups
from scarctl.checkpoint.distance import Norm, Scratch
from scarctl.checkpoint.loading import views_of
from scarctl.util.arrays import Ids

_UNKNOWN = 1e150
"""Distance of a copy that is not known: such a partition is chosen first."""


class Sent:
    """What one session has asked the store to take."""

    def __init__(self, arena: Arena, norm: Norm, *, exact: bool) -> None:
        """exact: compare with a copy of what the store has, instead of adding up movements."""
        self._arena = arena
        self._norm = norm
        self.version: Ids = arena.durable.copy()
        """Version of the copy that the store has, or gets: int64 (partitions,), `NEVER` for none."""
        self._moved = np.where(arena.pending(), _UNKNOWN, 0.0)
        self._asked = arena.saved.copy()
        """Moment of the copy that was there when the store was last asked to take it."""
        self._under_way = np.zeros(arena.layout.partitions)
        """Distances from the store's copies of those that wait for it, when they were asked for."""
        self._copy = [[torch.empty(0)] for _ in arena.layout.groups] if exact else None
        self._known = np.zeros(arena.layout.partitions, dtype=bool)
        """Of which partitions `_copy` has the store's values."""

    def moved(self, ids: Ids, distance: NDArray[np.float64]) -> None:
        """Note that these partitions were copied into memory, at these distances from their copies there before."""
        self._moved[ids] = np.minimum(self._moved[ids] + distance, _UNKNOWN)

    def distances(self, slot: Slot) -> NDArray[np.float64]:
        """Return the distance of every copy in a slot from the store's: float64 of shape (partitions,)."""
        if self._copy is None:
            return self._moved.copy()
        layout, views = self._arena.layout, views_of(slot)
        groups = [g for g, group in enumerate(layout.groups) if group.partitions and self._copy[g][0].numel()]
        found = np.full(layout.partitions, _UNKNOWN)
        compared = distances_of_groups(
            [layout.groups[g] for g in groups],
            [views[g][:1] for g in groups],
            [self._copy[g] for g in groups],
            self._norm,
            Scratch(),
        )
        for g, distance in zip(groups, compared, strict=True):
            found[int(layout.base[g]) : int(layout.base[g + 1])] = distance
        # Slots may have changed although the parameter has not.
        found = np.where(self._known, found, _UNKNOWN)
        return np.where(slot.moments == self._asked, 0.0, found)

    def asked(self, ids: Ids, version: int | None = None) -> None:
        """Note that the store gets the present copies of `ids` (ascending), or later ones.

        version: of a whole state, with which all other partitions equal the store's, too; None: not of one.
        """
        self._under_way[ids] += np.minimum(self._moved[ids], _UNKNOWN)
        self._moved[ids] = 0.0
        self.version[ids], self._asked[ids] = self._arena.version[ids], self._arena.moments[ids]
        if version is not None:
            self._moved[:] = 0.0
            self.version[:] = version
        if self._copy is not None:
            self._keep(ids)

    def unsaved(self) -> NDArray[np.float64]:
        """Return the distance of every copy in memory from what is durable, NaN if unknown: float64 (partitions,)."""
        self._under_way[self._arena.saved >= self._asked] = 0.0
        found = self._moved + self._under_way
        return np.where(found < _UNKNOWN, np.minimum(found, 3e38), np.nan)

    def replaced(self, ids: Ids) -> None:
        """Note that the copies of these partitions in memory were replaced, so that no distance of theirs is known."""
        self._moved[ids] = _UNKNOWN
        self._known[ids] = False

    def forget(self) -> None:
        """Note that copies in memory were replaced, so that no distance is known."""
        self.version[:], self._asked[:] = self._arena.durable, self._arena.saved
        self._moved[:] = np.where(self._arena.pending(), _UNKNOWN, 0.0)
        self._known[:] = False

    def _keep(self, ids: Ids) -> None:
        """Copy the parameters of these partitions: the store gets them."""
        assert self._copy is not None
        layout, views = self._arena.layout, views_of(self._arena.slot)
        starts, stops = layout.row_ranges(ids)
        for g in np.unique(layout.group_of(ids)).tolist():
            saved = views[g][0]
            if not self._copy[g][0].numel():
                self._copy[g] = [saved.clone()]
                continue
            mine = (ids >= layout.base[g]) & (ids < layout.base[g + 1])
            for start, stop in zip(starts[mine].tolist(), stops[mine].tolist(), strict=True):
                if saved.dim():
                    self._copy[g][0][start:stop] = saved[start:stop]
                else:
                    self._copy[g][0].copy_(saved)
        self._known[ids] = True
