"""Keep a bounded history of how far a run's parameters move, from which its convergence rate is estimated.

The history is a list of increments ‖x(k + gap) - x(k)‖. When it is full, every second point is dropped, and new points
span twice the gap: the points cover a long run from its beginning to its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.state.version import MAX_STEP
from scarctl.theory.convergence import LEAST_POINTS, Convergence, NoEstimate, fit_increments

MOST = 64
"""Most points that are kept."""
_RECENT = 4
"""Number of newest points whose mean is `History.speed`."""

Point = tuple[int, int, float]
"""Iteration k, gap in iterations, ‖x(k + gap) - x(k)‖ of the parameters."""


class History:
    """Points by ascending iteration. Their spans do not overlap."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points = list(points)
        self.least_gap = 1
        """Least iterations that the next point spans."""
        if len(self._points) > 1:
            self.least_gap = min(gap for _, gap, _ in self._points[-LEAST_POINTS:])

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)

    def add(self, step: int, gap: int, norm: float) -> None:
        """Add the point ‖x(step + gap) - x(step)‖. `step` must not precede the end of the newest point."""
        self._points.append((step, gap, norm))
        if len(self._points) > MOST:
            self._points = self._points[1::2]
            self.least_gap = 2 * gap

    def until(self, step: int) -> History:
        """Return the points that end at or before this iteration, for a run that continues from it."""
        return History(point for point in self._points if point[0] + point[1] <= step)

    def convergence(self, step: int) -> Convergence | NoEstimate:
        """Estimate the convergence rate at `step`; the estimate's `x0_distance` is ‖x(step) - x*‖.

        Only the later half of the run counts: hardly any run converges linearly from its beginning.
        """
        if not self._points:
            return NoEstimate("the run has no saved movements")
        late = [point for point in self._points if 2 * point[0] >= step]
        if len(late) < LEAST_POINTS:
            return NoEstimate(f"{len(late)} of {LEAST_POINTS} checkpoints in the run's later half")
        steps, gaps, norms = np.array(late, dtype=np.float64).T
        return fit_increments(steps - step, norms, gaps)

    def speed(self) -> float | None:
        """Return the distance that the parameters have recently moved per iteration; None if it is unknown or 0.

        If a run follows the noise of its batches, steps cancel, and the distance is less than the length of one step.
        """
        recent = self._points[-_RECENT:]
        moved = sum(norm for _, _, norm in recent)
        return moved / sum(gap for _, gap, _ in recent) if moved > 0 else None

    def to_array(self) -> NDArray[np.float64]:
        """Return the points for a checkpoint's extras: float64 of shape (points, 3), columns iteration, gap, norm."""
        return np.array(self._points, dtype=np.float64).reshape(-1, 3)

    @staticmethod
    def from_array(points: Any) -> History:
        """Return the history of a `to_array`, or an empty one for anything else: only forecasts depend on it."""
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
        """Return the history of a whole state: the points that the histories of all its parts have."""
        if len(parts) == 1:
            return parts[0]
        norms = [{(step, gap): norm for step, gap, norm in part.points} for part in parts]
        common = set.intersection(*map(set, norms)) if norms else set()
        return History(
            (step, gap, math.hypot(*(part[step, gap] for part in norms))) for step, gap in sorted(common)
        )
