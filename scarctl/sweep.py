"""Distances found between checkpoints, a piece after every iteration: a checkpoint then only has to copy.

In the time between two checkpoints every partition is compared once, if looks keep up; what none has reached since it
was copied is compared when it is asked for. So a distance is up to an interval old, and partitions that are compared
early seem to have moved a little less than those that are compared late; whose turn is early changes, as a turn need
not fit the interval. Nobody waits for a comparison, not even the optimizer: it may write while partitions are read
here. That makes a distance wrong by a part of one step, and harms nothing: what is copied is read by others, who are
waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from scarctl.distance import Norm, Scratch
from scarctl.layout import Layout
from scarctl.live import LiveState

Ids = NDArray[np.int64]

_PIECE = 4 << 20
"""Bytes of parameters after which a checkpoint that waits gets its turn."""


class Sweep:
    """Newest distances of all partitions. One look at a time."""

    def __init__(self, layout: Layout, norm: Norm) -> None:
        self._layout = layout
        self._norm = norm
        self._known = np.zeros(layout.partitions)
        self._unknown = np.ones(layout.partitions, dtype=bool)
        """Not compared since they were copied last: no distance, rather than none."""
        self._next = 0
        """The partition at which the next look begins."""
        self._changes = 0
        """How often others than looks have set what is unknown."""
        self._interrupted = threading.Event()

    def distances(self, live: LiveState, g: int, scratch: Scratch) -> NDArray[np.float64]:
        """Of all partitions of group `g`, float64 of shape (partitions of it,). Compares those that it does not know.

        NaN or Inf only where values were found not to be finite just now.
        """
        span = slice(int(self._layout.base[g]), int(self._layout.base[g + 1]))
        unknown = self._unknown[span] | ~np.isfinite(self._known[span])
        ids = np.flatnonzero(unknown) + span.start
        if ids.size:
            self._known[ids] = live.distances_of(g, ids, self._norm, scratch)
            self._unknown[ids] = False
        return self._known[span].copy()

    def forget(self, ids: Ids | slice) -> None:
        """Partitions `ids` were copied, or changed by no step: nothing is known of them any more."""
        self._changes += 1
        self._unknown[ids] = True

    def interrupt(self) -> None:
        """End the look that is under way, if there is one, soon."""
        self._interrupted.set()

    def go_on(self) -> None:
        """Looks need not end early any more."""
        self._interrupted.clear()

    def look(self, live: LiveState, groups: Sequence[int], share: float) -> None:
        """Compare the next partitions of these groups: `share` of them by bytes, in (0, 1], or fewer if interrupted."""
        row_bytes = {g: self._layout.groups[g].tensors[0].row_bytes for g in groups}
        left = share * sum(self._layout.groups[g].tensors[0].nbytes for g in groups)
        scratch = Scratch()
        for g, ids in self._pieces(groups):
            if left <= 0 or self._interrupted.is_set():
                return
            changes = self._changes
            found = live.distances_of(g, ids, self._norm, scratch)
            if changes == self._changes:
                self._known[ids] = found
                self._unknown[ids] = False
            self._next = int(ids[-1]) + 1
            left -= ids.size * self._layout.groups[g].rows_per_partition * row_bytes[g]

    def _pieces(self, groups: Sequence[int]) -> Iterator[tuple[int, Ids]]:
        """(Group, adjacent partitions) of all groups in order, once, beginning with the next one to be looked at."""
        at = self._next
        for first, last in ((at, self._layout.partitions), (0, at)):
            for g in groups:
                start, stop = max(first, int(self._layout.base[g])), min(last, int(self._layout.base[g + 1]))
                group = self._layout.groups[g]
                together = max(1, _PIECE // max(1, group.rows_per_partition * group.tensors[0].row_bytes))
                for piece in range(start, stop, together):
                    yield g, np.arange(piece, min(stop, piece + together))
