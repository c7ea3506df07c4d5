"""Extrapolating recovery: where a lost partition probably was, by how it moved before it was saved.

A partition with the saved values s, saved `gap` iterations after the values b before, and lost `elapsed` iterations
after s, comes back as s + a · min(1, elapsed / gap) · (s - b). The factor a is one number per group, fitted as the run
goes: before every checkpoint the live values say what the best a would have been, by least squares over partitions of
the group. It is 0 while its guesses, each judged before it was learnt from, would have done harm so far.

Only parameters of floating point are extrapolated, never the optimizer's slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FIELD = "extrapolation"
"""Of a session's extras, where its fits lie."""
_KEEP = 0.9
"""Weight of what was seen one checkpoint earlier."""
_SUMS = 4

Floats = NDArray[np.float64]


def reach(elapsed: ArrayLike, gap: ArrayLike) -> Floats:
    """min(1, elapsed / gap), of iterations: how much of its last movement a partition is taken to have repeated.

    0 where there is no gap: it was saved only once.
    """
    gap = np.asarray(gap)
    return np.where(gap > 0, np.clip(np.asarray(elapsed) / np.maximum(gap, 1), 0.0, 1.0), 0.0)


class Fits:
    """Least squares of movements y by guesses d, over checkpoints, for each group: a = Σ d·y / Σ d·d, shrunk towards 0.

    Each checkpoint counts as much as the others however far things moved, and one more that says 0 is counted in.
    All arrays are float64 of shape (groups,).
    """

    def __init__(self, groups: int) -> None:
        # Of checkpoints, of their gains, of d·y / y·y and of d·d / y·y.
        self._sums = np.zeros((_SUMS, groups))

    @property
    def candidate(self) -> Floats:
        """The factors, whether or not they have helped."""
        count, _, dy, dd = self._sums
        slope = np.divide(dy, dd, out=np.zeros_like(dy), where=dd > 0)
        return np.clip(slope * count / (count + 1), 0.0, 1.0)

    @property
    def factor(self) -> Floats:
        """The factors to use: 0 unless candidates would have made squared perturbations smaller so far."""
        return np.where(self._sums[1] > 0, self.candidate, 0.0)

    @property
    def gain(self) -> Floats:
        """The share of squared perturbations that the candidates would have saved so far; negative: added."""
        count, gain, _, _ = self._sums
        return np.divide(gain, count, out=np.zeros_like(gain), where=count > 0)

    def movement(self, dd: Floats) -> Floats:
        """Squared movements that go with guesses of these squared norms, by what was seen so far."""
        count, _, _, seen = self._sums
        return np.divide(dd * count, seen, out=np.zeros_like(seen), where=seen > 0)

    def learn(self, dy: Floats, dd: Floats, yy: Floats) -> None:
        """One checkpoint's d·y, d·d and y·y. Nothing is learnt where nothing is guessed, or something is not finite.

        A group that stands still, against the guess, was frozen: what was learnt of it is over.
        """
        a = self.candidate
        with np.errstate(all="ignore"):
            seen = np.stack([np.ones_like(yy), (2 * a * dy - a * a * dd) / yy, dy / yy, dd / yy])
            told = np.isfinite(seen).all(axis=0) & (dd > 0) & (yy > 0)
        self._sums[:, told] = _KEEP * self._sums[:, told] + seen[:, told]
        self._sums[:, (dd > 0) & (yy == 0)] = 0

    def to_array(self) -> Floats:
        """Shape (4, groups). For the extras of a checkpoint."""
        return self._sums.copy()

    @staticmethod
    def from_array(sums: Any, groups: int) -> Fits:
        """What `to_array` gave; fits that know nothing for anything else, or of another number of groups."""
        fits = Fits(groups)
        if isinstance(sums, np.ndarray) and sums.dtype == np.float64 and sums.shape == fits._sums.shape:
            count, _, _, dd = sums
            if np.isfinite(sums).all() and (count >= 0).all() and (dd >= 0).all():
                fits._sums = sums.copy()
        return fits


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """What a recovery has extrapolated."""

    partitions: int
    """That came back further along the way than they were saved. They are no copies of anything that is saved."""
    unknown: int
    """That came back as they were saved, for it is not known how they had moved before."""
    factors: Mapping[str, float]
    """The factor of every parameter among what was lost, by its name; 0: it came back as it was saved."""
    expected_gain: float | None
    """The share of the squared perturbation of `partitions` that this is expected to save; None when there are none.
    It is what the factors would have saved at the checkpoints so far, each judged before it was learnt from."""

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return {
            "partitions": self.partitions,
            "unknown": self.unknown,
            "factors": dict(self.factors),
            "expected_gain": self.expected_gain,
        }
