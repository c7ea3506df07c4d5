"""Fit how parameters continue their last movement, to extrapolate lost partitions beyond their saved values.

A lost partition is restored as s + a · min(1, elapsed / gap) · (s - b). Here s are its newest saved values, b the
values saved `gap` iterations before s, and `elapsed` the iterations from s to the loss. The factor a is one number
per group. Before every checkpoint the live values give the best a by least squares over the group's partitions. Each
guess is scored before it is learnt from. The factor is 0 unless the guesses so far would have reduced perturbations by
more than chance: their mean gain exceeds its standard error.

Only floating-point parameters are extrapolated, never the optimizer's slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scarctl.util.document import Document

_KEEP = 0.9
"""Weight of a checkpoint relative to the next one."""
_SUMS = 5

Floats = NDArray[np.float64]


def reach(elapsed: ArrayLike, gap: ArrayLike) -> Floats:
    """Return min(1, elapsed / gap), the assumed share of its last movement that a partition has repeated.

    elapsed, gap: iterations. The result is 0 where gap is 0: the partition was saved only once.
    """
    gap = np.asarray(gap)
    return np.where(gap > 0, np.clip(np.asarray(elapsed) / np.maximum(gap, 1), 0.0, 1.0), 0.0)


class Fits:
    """Least squares of movements y by guesses d over checkpoints, for each group: a = Σ d·y / Σ d·d, shrunk towards 0.

    Each checkpoint is normalized by y·y, so that all weigh the same. One more checkpoint with a = 0 is counted in.
    All arrays are float64 of shape (groups,).
    """

    def __init__(self, groups: int) -> None:
        # Weighted sums over checkpoints: of 1, of gains, of d·y / y·y, of d·d / y·y, of squared gains.
        self._sums = np.zeros((_SUMS, groups))

    @property
    def candidate(self) -> Floats:
        """The fitted factors in 0..1, whether or not they have helped."""
        count, _, dy, dd, _ = self._sums
        slope = np.divide(dy, dd, out=np.zeros_like(dy), where=dd > 0)
        return np.clip(slope * count / (count + 1), 0.0, 1.0)

    @property
    def factor(self) -> Floats:
        """The factors to use: 0 unless the candidates would have reduced squared perturbations so far, beyond chance.

        A single checkpoint shows no chance, so at least two are needed.
        """
        count, gain, _, _, squares = self._sums
        # mean > sqrt(variance / count), in sums
        clear = (gain > 0) & (gain * gain * (count + 1) > squares * count)
        return np.where((count > 1) & clear, self.candidate, 0.0)

    @property
    def gain(self) -> Floats:
        """The share by which the candidates would have reduced squared perturbations so far; negative: enlarged."""
        count, gain, *_ = self._sums
        return np.divide(gain, count, out=np.zeros_like(gain), where=count > 0)

    def movement(self, dd: Floats) -> Floats:
        """Return the squared movements expected for guesses of these squared norms, from the checkpoints so far."""
        count, _, _, seen, _ = self._sums
        return np.divide(dd * count, seen, out=np.zeros_like(seen), where=seen > 0)

    def learn(self, dy: Floats, dd: Floats, yy: Floats) -> None:
        """Learn from one checkpoint's d·y, d·d and y·y. Groups without a guess, or with non-finite values, are skipped.

        A group that has not moved despite a guess was frozen: its fit starts again.
        """
        a = self.candidate
        with np.errstate(all="ignore"):
            gain = (2 * a * dy - a * a * dd) / yy
            seen = np.stack([np.ones_like(yy), gain, dy / yy, dd / yy, gain * gain])
            usable = np.isfinite(seen).all(axis=0) & (dd > 0) & (yy > 0)
        self._sums[:, usable] = _KEEP * self._sums[:, usable] + seen[:, usable]
        self._sums[:, (dd > 0) & (yy == 0)] = 0

    def to_array(self) -> Floats:
        """Return the sums for a checkpoint's extras: float64 of shape (5, groups)."""
        return self._sums.copy()

    @staticmethod
    def from_array(sums: Any, groups: int) -> Fits:
        """Return the fits of a `to_array`; empty fits for anything else or another number of groups."""
        fits = Fits(groups)
        if isinstance(sums, np.ndarray) and sums.dtype == np.float64 and sums.shape == fits._sums.shape:
            count, _, _, dd, squares = sums
            if np.isfinite(sums).all() and (count >= 0).all() and (dd >= 0).all() and (squares >= 0).all():
                fits._sums = sums.copy()
        return fits


@dataclass(frozen=True, slots=True)
class Extrapolation(Document):
    """Report on the extrapolation of a recovery."""

    partitions: int
    """Number of partitions restored beyond their saved values. They equal no saved copy."""
    unknown: int
    """Number of partitions restored as saved, because their earlier movement is unknown."""
    factors: Mapping[str, float]
    """The factor of every lost parameter by its name; 0: restored as saved."""
    expected_gain: float | None
    """Expected reduction of the squared perturbation of `partitions`, as a share; None without partitions. It is the
    mean reduction at the checkpoints so far."""
