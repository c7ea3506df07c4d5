"""Plan an evacuation: in which order pending copies are saved, and how many bytes go into the next commit.

Pure functions of arrays and seconds, without clock and store. A commit that is cut off saves nothing, so each one takes
a small part of the time left. Its size follows the bandwidth of the earlier ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FIRST = 256 << 10
"""Bytes of the first commit if no speed is known."""
GROWTH = 4
"""Largest ratio of a commit's bytes to those of the largest one that was measured."""
SHARE = 0.2
"""Fraction of the time left that a commit takes, after the first was measured."""
FIRST_SHARE = 1 / 16
"""Fraction of the time left that the first commit takes."""
FIRST_KNOWN = 1 << 20
"""Most bytes of the first commit: the known speed may be outdated, and a commit that is cut off saves nothing."""
SURE = 0.8
"""Largest predicted fraction of the time left for which a commit is still made."""
SMALL = 16 << 10
"""Least bytes that a commit counts as: what it takes to write a few bytes does not show the speed."""
LEAST = 0.02
"""Least planned seconds of a commit, so that the last ones do not become ever smaller."""
_KEPT = 3
"""Number of newest measurements, whose slowest counts."""
_MOST = 32
"""Number of newest measurements that are kept."""


@dataclass(slots=True)
class Pace:
    """Predicts the seconds of a commit: a fixed time, and the bytes over a bandwidth.

    earlier: what was measured before, and may be outdated; None: nothing.
    """

    earlier: Pace | None = None
    _points: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MOST))
    """Bytes and seconds of the newest commits."""

    def add(self, nbytes: int, seconds: float) -> None:
        """Note a commit that is durable."""
        self._points.append((max(nbytes, SMALL), max(seconds, 1e-6)))

    def seconds(self, nbytes: int) -> float:
        """Predict the seconds of a commit of `nbytes` bytes; 0 without any measurement."""
        fixed, bandwidth = self._line()
        return fixed + (nbytes / bandwidth if bandwidth else 0.0)

    def room(self, left: float) -> tuple[int, float]:
        """Return the bytes of the next commit, and the most bytes that one may have, if `left` seconds are left.

        Both are 0 if even a small commit may end too late. The second is infinite if nothing is known.
        """
        fixed, bandwidth = self._line()
        fixed = max(LEAST, fixed)
        usable = left * SURE
        if usable <= fixed:
            return 0, 0
        if not bandwidth:
            return FIRST, math.inf
        share = SHARE if self._points else FIRST_SHARE
        spent = min(usable, max(left * share, 2 * fixed))
        usual = (spent - fixed) * bandwidth
        largest = GROWTH * max((nbytes for nbytes, _ in self._points), default=0)
        usual = min(usual, largest or FIRST_KNOWN)
        return max(1, int(usual)), (usable - fixed) * bandwidth

    def _line(self) -> tuple[float, float]:
        """Return the seconds of a commit without bytes, and bytes per second: 0 if unknown.

        They define a line through the smallest and the largest commit. If the newest ones took longer than the line
        predicts, both are scaled by that factor.
        """
        if not self._points:
            return (0.0, 0.0) if self.earlier is None else self.earlier._line()
        (least, shortest), (most, longest) = min(self._points), max(self._points)
        if most >= 2 * least and longest > shortest:
            bandwidth = (most - least) / (longest - shortest)
            fixed = max(0.0, shortest - least / bandwidth)
        else:  # similar sizes do not show the fixed part: assume that all of the time is fixed
            bandwidth, fixed = most / longest, shortest
        newest = list(self._points)[-_KEPT:]
        slower = [seconds / (fixed + nbytes / bandwidth) for nbytes, seconds in newest]
        factor = max(1.0, *slower)
        return fixed * factor, bandwidth / factor


def order(
    distance: NDArray[np.float32], nbytes: NDArray[np.int64], missing: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the indices of pending copies in the order in which they are saved: most changed per byte first.

    distance: of each copy from the store's, NaN if unknown: float32 of any length. nbytes: int64, the same length.
    missing: the store has no copy at all, and no recovery is possible without one: bool, the same length.

    Missing ones come first, then those of unknown distance. Ties keep their order.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        urgency = np.square(distance.astype(np.float64)) / np.maximum(nbytes, 1)
    unknown = np.isnan(urgency)
    urgency[unknown] = 0.0
    rank = np.where(missing, 0, np.where(unknown, 1, 2))
    return np.lexsort((-urgency, rank)).astype(np.int64)


def fitting(nbytes: NDArray[np.int64], room: int, most: float) -> NDArray[np.int64]:
    """Return the indices that the next commit takes from `nbytes`, which are in order: int64, ascending.

    It takes the longest prefix of at most `room` bytes. If the first copy is larger, it takes only the first copy of at
    most `most` bytes, or nothing if every copy is larger.
    """
    count = int(np.searchsorted(np.cumsum(nbytes), room, side="right"))
    if count:
        return np.arange(count, dtype=np.int64)
    return np.flatnonzero(nbytes <= most)[:1].astype(np.int64)
