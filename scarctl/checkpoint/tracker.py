"""Find what has changed since the newest checkpoint in memory, and how far parameters have moved since then.

All values of all parameters are compared with their copies. Where all of a parameter has moved, its slots count as
changed, too. Otherwise they are compared. Two kinds of groups need less:

**Frozen groups** (`StateGroup.frozen`) that once equalled their copies count as unchanged while torch counts no write
to them. Writes through `.data` are not counted. So every checkpoint compares another one in 64 of their partitions, and
all of them if one has moved.

**Tables with sparse gradients** change in the rows that get a gradient (`touched`).

A checkpoint on demand, such as the last one of a session, compares everything. A regular one of a state that goes to
the store as a whole compares a quarter of the values (`scarctl.checkpoint.partly`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, touched_rows_of
from scarctl.checkpoint.distance import Norm, Scratch
from scarctl.checkpoint.live_state import LiveState
from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids

if TYPE_CHECKING:
    from scarctl.checkpoint.touched import Touches

_OTHERS = 512
"""Partitions of a table that are checked for a move without a gradient."""
_TURNS = 64
"""Checkpoints in which every partition of a frozen group is compared once."""
AGAIN = 8
"""Looks for which an estimate of distances serves: measuring all values costs more than copying them."""
_FEW = 1 / 4
"""Share of a table's partitions below which gathering them is faster than comparing all."""


def touched_of(adapter: Adapter, *, hooked: bool) -> Callable[[], Mapping[str, torch.Tensor]] | None:
    """Return a function that returns the rows of tables with sparse gradients which the coming step changes, or None.

    hooked: whether the session hooks into the optimizers' steps.
    """
    rows = touched_rows_of(adapter)
    return partial(rows, dense=False) if rows is not None and hooked else None


class Tracker:
    """Compares the live state of one session with its copies in memory."""

    def __init__(self, layout: Layout, norm: Norm = "l2", seed: int = 0) -> None:
        """seed: decides which values of a table without a gradient are compared."""
        self._layout = layout
        self._norm = norm
        self._seed = seed
        self._looks = 0
        self._number = {group.name: g for g, group in enumerate(layout.groups)}
        self._touches: dict[int, Touches] = {}
        self._marking = True
        self.unread: Set[int] = frozenset()
        """Groups of which the newest look has not read every value: some may not be finite."""
        self._estimated: dict[int, NDArray[np.float64]] = {}
        """Estimated distances by group, as last measured."""
        self._uneven: set[int] = set()
        """Groups that are not compared in part: they are small, or some of their partitions move and others do not."""
        self._frozen: dict[int, list[tuple[int, int]]] = {}
        """Marks of frozen groups that equalled their copies at the last look."""

    def touch(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Mark the rows that the coming step changes (`KnowsTouched`), in the training thread."""
        if not self._marking:
            return
        for name, touched in rows.items():
            g = self._number.get(name)
            if g is None or not self._layout.groups[g].partitions:
                continue
            if g not in self._touches:
                from scarctl.checkpoint.touched import Touches

                self._touches[g] = Touches(self._layout.groups[g], touched.device)
            self._touches[g].mark(touched)

    def give_up_touched(self) -> None:
        """Stop relying on marks, which have become wrong: from now on tables are compared like other groups."""
        self._marking = False
        self._touches.clear()

    def moved(self, ids: Ids) -> None:
        """Note that partitions `ids` (ascending) may differ from their copies, even if no step has changed them."""
        bounds = np.searchsorted(ids, self._layout.base)
        for g, touches in self._touches.items():
            touches.mark_partitions(ids[bounds[g] : bounds[g + 1]] - self._layout.base[g])
        for g in [g for g in self._frozen if bounds[g] < bounds[g + 1]]:
            del self._frozen[g]

    def copied(self) -> None:
        """Note that all partitions now equal their copies."""
        for touches in self._touches.values():
            touches.clear()

    def look(
        self, live: LiveState, *, thorough: bool, partly: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Compare the state with its copies.

        thorough: all of it. partly: estimate distances where that is faster, and note those groups in `unread`. An
        estimate serves for `AGAIN` looks, in which all partitions of its group count as changed.

        Returns two arrays of shape (layout.partitions,): the distance of each parameter from its copy, float64, NaN or
        Inf if it is not finite and differs; and whether any byte of the partition differs from its copy, bool.
        """
        self._looks += 1
        self.unread = frozenset()
        distance = np.zeros(self._layout.partitions)
        changed = np.zeros(self._layout.partitions, dtype=bool)
        scratch, whole = Scratch(), list[int]()
        for g in range(len(self._layout.groups)):
            if self._layout.groups[g].partitions and (
                thorough or not self._needs_less(live, g, distance, changed)
            ):
                whole.append(g)
        found: dict[int, NDArray[np.float64]] = {}
        if partly and not thorough and self._norm == "l2":
            for g in (g for g in whole if g not in self._uneven and g not in self._touches):
                estimated = self._estimated.get(g) if self._looks % AGAIN else None
                if estimated is None:
                    estimated = live.estimates(g, self._looks // AGAIN, scratch)
                self._estimated.pop(g, None)
                if estimated is None:
                    self._uneven.add(g)
                    continue
                found[g] = estimated
                if np.isfinite(estimated).all():
                    self._estimated[g] = estimated
            self.unread = set(found)
        completely = [g for g in whole if g not in found]
        every = live.groups_distances(completely, self._norm, scratch)
        found.update(zip(completely, every, strict=True))
        for g in whole:
            of_group = found[g]
            span = self._span(g)
            distance[span], changed[span] = of_group, of_group != 0
            if not changed[span].all():
                changed[span] = live.changed_of(g)
            if g in live.frozen and not changed[span].any():
                self._frozen[g] = live.mark(g)
            else:
                self._frozen.pop(g, None)
        return distance, changed

    def _span(self, g: int) -> slice:
        return slice(int(self._layout.base[g]), int(self._layout.base[g + 1]))

    def _needs_less(
        self, live: LiveState, g: int, distance: NDArray[np.float64], changed: NDArray[np.bool_]
    ) -> bool:
        """Compare a frozen group or a table with sparse gradients. Return False if it has to be compared completely."""
        first, count = int(self._layout.base[g]), self._layout.groups[g].partitions
        if g in live.frozen:
            if self._frozen.get(g) != live.mark(g):
                return False
            some = np.arange(self._looks % min(_TURNS, count), count, _TURNS)
            return not live.changed_at(g, first + some).any()
        touches = self._touches.get(g)
        if touches is None:
            return False
        marked = touches.marked()
        ids = np.flatnonzero(marked)
        if ids.size > _FEW * count:
            return False
        rng = np.random.Generator(np.random.PCG64([self._seed & 0xFFFFFFFFFFFFFFFF, g, self._looks]))
        some = np.unique(rng.integers(count, size=_OTHERS))
        some = some[~marked[some]]
        if live.changed_at(g, first + some).any():
            self.give_up_touched()
            return False
        distance[first + ids] = live.distances_of(g, first + ids, self._norm)
        changed[first + ids] = live.changed_at(g, first + ids)
        return True
