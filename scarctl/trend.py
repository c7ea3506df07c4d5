"""Whether parameters go on as they went, from a sample of their values: what extrapolating recovery is fitted on.

A part of every checkpoint, in its worker thread. Of each parameter it looks at a few partitions, the same ones always,
and at a few of their values: what they are now, what they were when they were last saved, and the time before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.dtypes import torch_of
from scarctl.extrapolation import FIELD, Fits, Floats, reach
from scarctl.layout import DTYPES, Group, Layout
from scarctl.sampling import values_at

PARTITIONS = 256
VALUES = 2048
"""Of each parameter at most so many partitions are looked at, and so many of their values in all."""

Ids = NDArray[np.int64]


class Trend:
    """Learns at every checkpoint: `look` before it copies, `saved` after that."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.groups = [g for g, group in enumerate(layout.groups) if extrapolates(group)]
        """The parameters: numbers of their groups, parallel to the fits."""
        picked = [_pick(layout.groups[g], g) for g in self.groups]
        self._index = [torch.from_numpy(at.reshape(-1)) for _, at in picked]
        """By parameter, positions in the flat tensor."""
        self._ids: Ids = _joined(
            [ids + layout.base[g] for g, (ids, _) in zip(self.groups, picked, strict=True)]
        )
        """Partitions of the sample, ascending; the arrays below are parallel to it."""
        self._values: Ids = _joined([np.full(len(at), at.shape[1]) for _, at in picked])
        self._step = np.zeros(len(self._ids), dtype=np.int64)
        """Iteration after which each was last known to be as it is saved."""
        self._gap = np.zeros(len(self._ids), dtype=np.int64)
        """Iterations between that and the copy before; 0: not known."""
        self._there = np.zeros(len(self._ids), dtype=bool)
        """Its saved values are known."""
        # Over values; where they begin by partition, and by parameter.
        self._first = np.cumsum(self._values) - self._values
        self._begin = np.cumsum([0, *(index.numel() for index in self._index[:-1])])
        self._now, self._saved, self._before = (np.zeros(int(self._values.sum())) for _ in range(3))
        self.fits = Fits(len(self.groups))

    def look(self, tensors: Sequence[Sequence[torch.Tensor]], step: int) -> None:
        """Learn from the state as it is after iteration `step`.

        tensors: live, parallel to the layout's groups; the first of each is the parameter.
        """
        if not self.groups:
            return
        now = []
        for n, g in enumerate(self.groups):
            # Once: positions stay where the parameter is.
            self._index[n] = self._index[n].to(tensors[g][0].device)
            now.append(values_at(tensors[g][0], self._index[n]))
        self._now = np.concatenate(now)
        weight = reach(step - self._step, self._gap)
        if not weight.any():
            return
        with np.errstate(invalid="ignore", over="ignore"):
            guess = self._each(weight) * (self._saved - self._before)
            moved = self._now - self._saved
            # Where there is no guess there is nothing to learn about it.
            told = self._each(np.logical_or.reduceat(guess != 0, self._first))
            told &= np.isfinite(guess) & np.isfinite(moved)
            guess, moved = np.where(told, guess, 0.0), np.where(told, moved, 0.0)
            self.fits.learn(
                *(
                    np.add.reduceat(a * b, self._begin)
                    for a, b in ((guess, moved), (guess, guess), (moved, moved))
                )
            )

    def saved(self, ids: Ids, step: int, *, sealed: bool = False) -> None:
        """Partitions `ids` (ascending) were saved as the last look has seen them, after iteration `step`.

        sealed: all others are still as they were saved.
        """
        mine = self._among(ids)
        each = self._each(mine)
        self._before[each] = self._saved[each]
        self._saved[each] = self._now[each]
        on = mine | self._there if sealed else mine
        # One that was known to stand still meanwhile has taken all that time for its last movement.
        known = self._there & (mine | (self._gap > 0))
        gap = np.where(mine, 0, self._gap) + step - self._step
        self._gap[on] = np.where(known, gap, 0)[on]
        self._step[on] = step
        self._there |= mine

    def forget(self, ids: Ids) -> None:
        """Partitions `ids` (ascending) have jumped: what they were and what they are now are not of one movement."""
        mine = self._among(ids)
        self._gap[mine], self._there[mine] = 0, False

    def go_on(self, extras: Any) -> None:
        """Go on from another state, with the fits in its extras."""
        found = extras.get(FIELD) if isinstance(extras, dict) else None
        self.fits = Fits.from_array(found, len(self.groups))
        self._gap[:], self._there[:] = 0, False

    def to_extras(self) -> dict[str, Any]:
        """What `go_on` reads, as one more field of extras."""
        return {FIELD: self.fits.to_array()}

    def by_group(self, values: Floats) -> Floats:
        """Values of the fits as those of all groups of the layout, 0 for what is never extrapolated."""
        result = np.zeros(len(self._layout.groups))
        result[self.groups] = values
        return result

    def expected_gain(self, guesses: Floats) -> float | None:
        """The share of a perturbation's square that guesses of these squared norms, by group of the layout, will save.

        None where nothing is guessed. Groups that move further count more.
        """
        movement = self.fits.movement(guesses[self.groups])
        return float(np.average(self.fits.gain, weights=movement)) if movement.sum() > 0 else None

    def _among(self, ids: Ids) -> NDArray[np.bool_]:
        if not ids.size:
            return np.zeros(len(self._ids), dtype=bool)
        at = np.minimum(np.searchsorted(ids, self._ids), ids.size - 1)
        found: NDArray[np.bool_] = ids[at] == self._ids
        return found

    def _each(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of the partitions, one for each of their sampled values."""
        return np.repeat(values, self._values)


def extrapolates(group: Group) -> bool:
    """Whether a group is a parameter that a movement can be told of: of floating point, with more than one byte."""
    spec = group.tensors[0]
    wide = torch_of(spec.dtype).is_floating_point and DTYPES[spec.dtype] > 1
    return group.kind == "parameter" and wide and math.prod(spec.shape) > 0


def _pick(group: Group, seed: int) -> tuple[Ids, Ids]:
    """Partitions of a group, ascending, and positions of values of theirs in the flat tensor: int64 of shape
    (partitions, values). Always the same of the same layout.
    """
    rng = np.random.default_rng(seed)
    count = min(group.partitions, PARTITIONS)
    width = math.prod(group.tensors[0].shape) // group.rows
    ids = np.arange(count)
    if group.partitions > count:
        # One of each of `count` equal pieces.
        ids = ((ids + rng.random(count)) * (group.partitions / count)).astype(np.int64)
    start = ids * group.rows_per_partition
    size = (np.minimum(start + group.rows_per_partition, group.rows) - start) * width
    values = min(int(size.max()), VALUES // count)
    # The same among the values of a partition: all of them where it has no more.
    within = (np.arange(values) + rng.random((count, values))) * (size[:, None] / values)
    return ids, start[:, None] * width + np.minimum(within.astype(np.int64), size[:, None] - 1)


def _joined(parts: Sequence[Ids]) -> Ids:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
