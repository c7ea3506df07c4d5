"""How far a run's parameters have moved, iteration by iteration: what its convergence is told from.

A bounded list of increments ‖x(k + gap) - x(k)‖. When it is full every second one goes, and those that come have twice
the gap: a long run is covered from its beginning to its end by as few points as a short one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.convergence import LEAST_POINTS, CannotTell, Convergence, fit_increments
from scarctl.version import MAX_STEP

MOST = 64
"""Points that are kept."""

Point = tuple[int, int, float]
"""Iteration k, gap in iterations, ‖x(k + gap) - x(k)‖ of the parameters."""


class History:
    """Points in the order of their iterations, which do not overlap."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points = list(points)
        self.least_gap = 1
        """Iterations that the next point has to span."""
        if len(self._points) > 1:
            self.least_gap = min(gap for _, gap, _ in self._points[-LEAST_POINTS:])

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)

    def add(self, step: int, gap: int, norm: float) -> None:
        """Take ‖x(step + gap) - x(step)‖; `step` is not before the end of the newest point."""
        self._points.append((step, gap, norm))
        if len(self._points) > MOST:
            self._points = self._points[1::2]
            self.least_gap = 2 * gap

    def until(self, step: int) -> History:
        """The points up to this iteration: what came later has not happened any more."""
        return History(point for point in self._points if point[0] + point[1] <= step)

    def convergence(self, step: int) -> Convergence | CannotTell:
        """How fast the run converges at `step`; the fit's `x0_distance` is ‖x(step) - x*‖.

        The later half of the run counts: hardly any run is linearly convergent from its beginning on.
        """
        if not self._points:
            return CannotTell("the run has not saved how far it moves")
        late = [point for point in self._points if 2 * point[0] >= step]
        if len(late) < LEAST_POINTS:
            return CannotTell(f"{len(late)} checkpoints in the run's later half; {LEAST_POINTS} are needed")
        steps, gaps, norms = np.array(late, dtype=np.float64).T
        return fit_increments(steps - step, norms, gaps)

    def to_array(self) -> NDArray[np.float64]:
        """Shape (points, 3): iteration, gap, norm. For the extras of a checkpoint."""
        return np.array(self._points, dtype=np.float64).reshape(-1, 3)

    @staticmethod
    def from_array(points: Any) -> History:
        """What `to_array` gave; no points for anything else, for nothing depends on them but a forecast."""
        if not isinstance(points, np.ndarray) or points.dtype != np.float64:
            return History()
        if points.ndim != 2 or points.shape[1] != 3 or len(points) > MOST or not np.isfinite(points).all():
            return History()
        steps, gaps, norms = points.T
        in_order = (steps >= 0).all() and (steps[1:] >= (steps + gaps)[:-1]).all()
        if not (in_order and (gaps >= 1).all() and (norms >= 0).all() and (steps + gaps <= MAX_STEP).all()):
            return History()
        return History((int(step), int(gap), norm) for step, gap, norm in points.tolist())

    @staticmethod
    def joined(parts: Sequence[History]) -> History:
        """Of a state in parts, from those of the parts: their squares add up. Points that all of them have."""
        if len(parts) == 1:
            return parts[0]
        norms = [{(step, gap): norm for step, gap, norm in part.points} for part in parts]
        common = set.intersection(*map(set, norms)) if norms else set()
        return History(
            (step, gap, math.hypot(*(part[step, gap] for part in norms))) for step, gap in sorted(common)
        )
