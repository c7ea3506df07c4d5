"""Learn from a sample of values whether parameters continue their recent movement, to fit extrapolating recovery.

This is part of every checkpoint, in its worker thread. It always reads the same few values of a few partitions of
each parameter, and compares them with their values at the last two saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.checkpoint.sampled import values_at
from scarctl.state.layout import DTYPES, Group, Layout
from scarctl.state.torch_dtypes import torch_of
from scarctl.theory.extrapolation import Fits, Floats, reach
from scarctl.util.arrays import Ids

PARTITIONS = 256
VALUES = 2048
"""Limits of the sample, per parameter: partitions, and values of all these partitions together."""


class Trend:
    """Learns at every checkpoint: `look` before its copies, `saved` after them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.groups = [g for g, group in enumerate(layout.groups) if extrapolates(group)]
        """Group indices of the parameters, parallel to the fits."""
        picked = [_pick(layout.groups[g], g) for g in self.groups]
        self._index = [torch.from_numpy(at.reshape(-1)) for _, at in picked]
        """Positions in the flat tensor, by parameter."""
        self._ids: Ids = _joined(
            [ids + layout.base[g] for g, (ids, _) in zip(self.groups, picked, strict=True)]
        )
        """Partitions of the sample, ascending; the arrays below are parallel to it."""
        self._values: Ids = _joined([np.full(len(at), at.shape[1]) for _, at in picked])
        self._step = np.zeros(len(self._ids), dtype=np.int64)
        """Iteration after which each partition was last known to equal its copy."""
        self._gap = np.zeros(len(self._ids), dtype=np.int64)
        """Iterations from the previous copy to that one; 0 if unknown."""
        self._there = np.zeros(len(self._ids), dtype=bool)
        """Whether the saved values of each partition are known."""
        self._still = np.zeros(len(self._ids), dtype=bool)
        """Whether each partition equalled an earlier copy at the last look: it stands still, so nothing is guessed."""
        self.looked = 0
        """The iteration of the last look."""
        # Arrays over sampled values, and the offsets at which each partition's and each parameter's values begin.
        self._first = np.cumsum(self._values) - self._values
        self._begin = np.cumsum([0, *(index.numel() for index in self._index[:-1])])
        self._now, self._saved, self._before = (np.zeros(int(self._values.sum())) for _ in range(3))
        self.fits = Fits(len(self.groups))

    def look(self, tensors: Sequence[Sequence[torch.Tensor]], step: int) -> None:
        """Learn from the state after iteration `step`.

        tensors: live tensors, parallel to the layout's groups; the first of each is the parameter.
        """
        if not self.groups:
            return
        live = [tensors[g][0] for g in self.groups]
        # Computed once, on the parameters' devices.
        self._index = [index.to(tensor.device) for index, tensor in zip(self._index, live, strict=True)]
        self._now, self.looked = np.concatenate(values_at(live, self._index)), step
        weight = np.where(self._still, 0.0, reach(step - self._step, self._gap))
        self._still = ~np.logical_or.reduceat(self._now != self._saved, self._first) & self._there
        if not weight.any():
            return
        with np.errstate(invalid="ignore", over="ignore"):
            guess = self._each(weight) * (self._saved - self._before)
            moved = self._now - self._saved
            # Without an extrapolated value there is no error to measure.
            measured = self._each(np.logical_or.reduceat(guess != 0, self._first))
            measured &= np.isfinite(guess) & np.isfinite(moved)
            guess, moved = np.where(measured, guess, 0.0), np.where(measured, moved, 0.0)
            self.fits.learn(
                *(
                    np.add.reduceat(a * b, self._begin)
                    for a, b in ((guess, moved), (guess, guess), (moved, moved))
                )
            )

    def saved(self, ids: Ids, step: int, *, sealed: bool = False) -> None:
        """Note that partitions `ids` (ascending) were saved with the values of the last look, after iteration `step`.

        sealed: whether all other partitions still equal their copies.
        """
        mine = self._among(ids)
        each = self._each(mine)
        self._before[each] = self._saved[each]
        self._saved[each] = self._now[each]
        on = mine | self._there if sealed else mine
        # If a partition has not moved since then, its last movement took the whole time.
        known = self._there & (mine | (self._gap > 0))
        gap = np.where(mine, 0, self._gap) + step - self._step
        self._gap[on] = np.where(known, gap, 0)[on]
        self._step[on] = step
        self._there |= mine
        self._still &= ~mine

    def forget(self, ids: Ids) -> None:
        """Forget the movement of partitions `ids` (ascending), which have jumped."""
        mine = self._among(ids)
        self._gap[mine], self._there[mine], self._still[mine] = 0, False, False

    def continue_from(self, fits: Any) -> None:
        """Continue from another state, with the fits in its extras (`Notes.fits`)."""
        self.fits = Fits.from_array(fits, len(self.groups))
        self._gap[:], self._there[:], self._still[:] = 0, False, False

    def by_group(self, values: Floats) -> Floats:
        """Spread values of the fits over all groups of the layout: float64 (groups,), 0 if never extrapolated."""
        result = np.zeros(len(self._layout.groups))
        result[self.groups] = values
        return result

    def expected_gain(self, guesses: Floats) -> float | None:
        """Predict the share of the squared perturbation that extrapolation saves; None without extrapolated values.

        guesses: their squared norms, of shape (groups,). Groups that move further count more.
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
        """Repeat the partitions' values for each of their sampled values."""
        return np.repeat(values, self._values)


def extrapolates(group: Group) -> bool:
    """Return whether a group is a parameter with a meaningful movement: floating point of more than one byte."""
    spec = group.tensors[0]
    wide = torch_of(spec.dtype).is_floating_point and DTYPES[spec.dtype] > 1
    return group.kind == "parameter" and wide and math.prod(spec.shape) > 0


def _pick(group: Group, seed: int) -> tuple[Ids, Ids]:
    """Choose partitions of a group, ascending, and positions of their values in the flat tensor: int64 of shape
    (partitions, values). The same layout always gives the same choice.
    """
    rng = np.random.default_rng(seed)
    count = min(group.partitions, PARTITIONS)
    width = math.prod(group.tensors[0].shape) // group.rows
    ids = np.arange(count)
    if group.partitions > count:
        # One partition of each of `count` equal pieces.
        ids = ((ids + rng.random(count)) * (group.partitions / count)).astype(np.int64)
    start = ids * group.rows_per_partition
    size = (np.minimum(start + group.rows_per_partition, group.rows) - start) * width
    values = min(int(size.max()), VALUES // count)
    # The same for the values of a partition: all of them if it has no more.
    within = (np.arange(values) + rng.random((count, values))) * (size[:, None] / values)
    return ids, start[:, None] * width + np.minimum(within.astype(np.int64), size[:, None] - 1)


def _joined(parts: Sequence[Ids]) -> Ids:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
