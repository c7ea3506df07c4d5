"""How far every partition has moved since it was saved, for choosing what to save: measured, or estimated for less.

exact     compares all values of the parameter with the copy: `scarctl.distance`.
sampled   compares a few values of every partition, others at every checkpoint: `scarctl.sampling`. Only where a
          partition has `sampling.NARROW` values or more.
touched   counts in how many steps the rows of an embedding table got a gradient: `scarctl.touches`.
auto      touched for what gets sparse gradients, sampled where partitions are large, exact for all else.

Whatever is chosen is compared exactly before it is copied. Sealed checkpoints never look at estimates.

**From counts to distances.** Groups are compared with each other, so counts have to become distances. At every
checkpoint a few hundred partitions of a table are compared exactly, those that were touched and those that were not, and

    squared distance  ~  gain * touches + drift * iterations since it was saved

is fitted to their sums. Drift is what weight decay and momentum do to rows without a gradient. Where it is zero, what was
not touched is not saved again; where it is not, such rows are chosen too, the oldest first, after those that moved more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, touched_rows_of
from scarctl.config import SessionSettings
from scarctl.distance import Norm, Scratch
from scarctl.errors import UsageError
from scarctl.layout import Layout
from scarctl.live import LiveState
from scarctl.sampling import NARROW
from scarctl.touches import Touches

Ids = NDArray[np.int64]
_NONE = np.empty(0, dtype=np.int64)
_TOUCHED = 1024
"""Touched partitions of a table that are compared exactly at a checkpoint."""
_UNTOUCHED = 256
"""And of those that were not touched."""


def touched_of(
    adapter: Adapter, settings: SessionSettings, *, auto: bool
) -> Callable[[], Mapping[str, torch.Tensor]] | None:
    """What gives the rows that the coming step changes; None where nobody wants to know.

    auto: the session hooks into the optimizers' steps. Raises UsageError for a tracker that needs what is not there.
    """
    if settings.tracker not in ("touched", "auto"):
        return None
    rows = touched_rows_of(adapter)
    if rows is None or not auto:
        if settings.tracker == "auto":
            return None
        raise UsageError(
            'tracker="touched" reads gradients right before an optimizer\'s step, and '
            + ("nothing tells of one here" if rows is not None else "there are none here"),
            hint='use tracker="exact", or a torch optimizer with auto=True',
        )
    dense = settings.tracker == "touched"
    return lambda: rows(dense=dense)


class Tracker:
    """See the module. Of one session; one checkpoint at a time."""

    def __init__(self, layout: Layout, kind: str, norm: Norm = "l2", seed: int = 0) -> None:
        """kind: one of `config.TRACKERS`. seed: decides which values are sampled."""
        self._layout = layout
        self._kind = kind
        self._norm = norm
        self._seed = seed
        self._turn: int | None = None
        self._number = {group.name: g for g, group in enumerate(layout.groups)}
        self._touches: dict[int, Touches] = {}
        self._counting = kind in ("touched", "auto")
        self._suspects = _NONE
        """Partitions that were not finite when they were looked at exactly, ascending."""
        self._scale: dict[int, NDArray[np.float64]] = {}
        """For "relative": squared norms of the copies of a sampled group; NaN: not known."""
        self._estimated: list[int] = []
        """Groups whose newest distances are estimates, ascending."""

    # -- what training tells --------------------------------------------------------------------------------------

    def touch(self, rows: Mapping[str, torch.Tensor]) -> None:
        """The coming step changes these rows: see `KnowsTouched`. Called in the training thread, before the step."""
        if not self._counting:
            return
        for name, touched in rows.items():
            g = self._number.get(name)
            if g is None or not self._layout.groups[g].partitions:
                continue
            if g not in self._touches:
                self._touches[g] = Touches(self._layout.groups[g], touched.device)
            self._touches[g].add(touched)

    def give_up_touched(self) -> None:
        """Counts have become wrong: from now on tables are like all else."""
        self._counting = False
        self._touches.clear()

    def saved(self, ids: Ids) -> None:
        """Partitions `ids` (ascending) are equal to their copies."""
        bounds = np.searchsorted(ids, self._layout.base)
        for g, touches in self._touches.items():
            mine = ids[bounds[g] : bounds[g + 1]]
            if mine.size:
                touches.reset(mine - self._layout.base[g])
        for g, scale in self._scale.items():
            scale[ids[bounds[g] : bounds[g + 1]] - self._layout.base[g]] = np.nan

    def saved_all(self, but: Ids) -> None:
        """All are equal to their copies but these (ascending)."""
        if but.size:
            self.saved(np.setdiff1d(np.arange(self._layout.partitions), but, assume_unique=True))
            return
        for touches in self._touches.values():
            touches.reset()
        self._scale.clear()
        self._suspects = _NONE

    def spoiled(self, ids: Ids) -> None:
        """Partitions `ids` (ascending) have no good copy."""
        bounds = np.searchsorted(ids, self._layout.base)
        for g, touches in self._touches.items():
            touches.spoiled(ids[bounds[g] : bounds[g + 1]] - self._layout.base[g])

    # -- what a checkpoint asks -----------------------------------------------------------------------------------

    def distances(self, live: LiveState, staleness: Ids, step: int) -> NDArray[np.float64]:
        """Distance of every partition from its copy: float64 of shape (layout.partitions,).

        staleness: iterations since the copies, int64 of the same shape. NaN or Inf where values are known not to be
        finite. What is chosen by these has to go through `check`.
        """
        self._turn = step if self._turn is None else self._turn + 1
        result, scratch = np.zeros(self._layout.partitions), Scratch()
        self._estimated = []
        for g in range(len(self._layout.groups)):
            span = slice(int(self._layout.base[g]), int(self._layout.base[g + 1]))
            if span.start == span.stop:
                continue
            touches = self._touches.get(g)
            if touches is not None and not touches.busy():
                result[span] = self._from_touches(live, g, touches.counts(), staleness[span])
            elif self._samples(g):
                result[span] = self._from_sample(live, g)
            else:
                result[span] = live.group_distances(g, self._norm, scratch)
                continue
            self._estimated.append(g)
        self._look_again(live, result)
        return result

    def check(self, live: LiveState, ids: Ids, distance: NDArray[np.float64]) -> tuple[Ids, Ids]:
        """Of `ids` (ascending), chosen by `distance`: those that may be copied, and those that are not finite.

        Sets the distances of what was only estimated.
        """
        bounds = np.searchsorted(ids, self._layout.base)
        for g in self._estimated:
            mine = ids[bounds[g] : bounds[g + 1]]
            if mine.size:
                distance[mine] = live.distances_of(g, mine, self._norm)
        finite = np.isfinite(distance[ids])
        bad = ids[~finite]
        self._suspects = np.union1d(self._suspects, bad)
        return ids[finite], bad

    def _samples(self, g: int) -> bool:
        group = self._layout.groups[g]
        values = group.rows_per_partition * math.prod(group.tensors[0].shape[1:])
        return self._kind in ("sampled", "auto") and not callable(self._norm) and values >= NARROW

    def _from_sample(self, live: LiveState, g: int) -> NDArray[np.float64]:
        squares = live.sampled_squares(g, self._seed + g, self._turn or 0)
        if self._norm == "rms":
            squares /= self._values(g)
        elif self._norm == "relative":
            squares /= np.maximum(self._scale_of(live, g), np.finfo(np.float32).tiny)
        return np.sqrt(squares)

    def _values(self, g: int) -> NDArray[np.float64]:
        """Values of every partition of the parameter: the last one may be short."""
        group = self._layout.groups[g]
        row = max(1, math.prod(group.tensors[0].shape[1:]))
        values = np.full(group.partitions, float(row * group.rows_per_partition))
        values[-1] = row * (group.rows - (group.partitions - 1) * group.rows_per_partition)
        return values

    def _scale_of(self, live: LiveState, g: int) -> NDArray[np.float64]:
        """Squared norms of all copies of the group, exact: of those only that are new since they were last needed."""
        scale = self._scale.setdefault(g, np.full(self._layout.groups[g].partitions, np.nan))
        unknown = np.flatnonzero(np.isnan(scale))
        if unknown.size:
            scale[unknown] = live.saved_squares_of(g, unknown + self._layout.base[g])
        return scale

    def _from_touches(
        self, live: LiveState, g: int, counts: NDArray[np.int32], staleness: Ids
    ) -> NDArray[np.float64]:
        first = int(self._layout.base[g])
        rng = np.random.Generator(np.random.PCG64([self._seed & 0xFFFFFFFFFFFFFFFF, g, self._turn or 0]))
        touched = np.flatnonzero(counts)
        some = _choice(rng, touched, _TOUCHED)
        # Hardly any are touched in a large table: no list of the others is made.
        others = np.unique(rng.integers(counts.size, size=2 * _UNTOUCHED))
        others = others[counts[others] == 0]

        squares = np.square(live.distances_of(g, first + some, self._norm))
        drifted = np.square(live.distances_of(g, first + others, self._norm))
        good, fine = np.isfinite(squares), np.isfinite(drifted)
        drift = drifted[fine].sum() / max(1, int(staleness[others[fine]].sum()))
        moved = squares[good].sum() - drift * staleness[some[good]].sum()
        gain = max(0.0, moved) / max(1, int(counts[some[good]].sum()))

        result = np.zeros(counts.size)
        if drift:
            np.multiply(staleness, drift, out=result)
        result[touched] += gain * counts[touched]
        np.sqrt(result, out=result)
        bad = np.union1d(some[~good], others[~fine])
        result[bad] = np.nan
        self._suspects = np.union1d(self._suspects, first + bad)
        return result

    def _look_again(self, live: LiveState, distance: NDArray[np.float64]) -> None:
        """Partitions that were not finite are looked at exactly until they are."""
        bounds = np.searchsorted(self._suspects, self._layout.base)
        for g in self._estimated:
            mine = self._suspects[bounds[g] : bounds[g + 1]]
            if mine.size:
                distance[mine] = live.distances_of(g, mine, self._norm)
        self._suspects = self._suspects[~np.isfinite(distance[self._suspects])]


def _choice(rng: np.random.Generator, ids: Ids, count: int) -> Ids:
    """At most `count` of `ids`, ascending."""
    if ids.size <= count:
        return ids
    return ids[np.unique(rng.integers(ids.size, size=count))]
