"""Distances found between checkpoints, a piece after every iteration: a checkpoint then only has to copy.

In the time between two checkpoints every partition is compared once, if looks keep up; what none has reached since it
was copied is compared when it is asked for. So a distance is up to an interval old, and partitions that are compared
early seem to have moved a little less than those that are compared late; whose turn is early changes, as a turn need
not fit the interval. Nobody waits for a comparison, not even the optimizer: it may write while partitions are read
here. That makes a distance wrong by a part of one step, and harms nothing: what is copied is read by others, who are
waited for.
"""

from __future__ import annotations

import bisect
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
_GROUP = 32 << 10
"""Bytes that are compared in the time that a group takes besides."""


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
        self._groups: Sequence[int] = ()
        self._nbytes = 0
        """Bytes of the parameters of these groups, which looks compare."""
        self._interrupted = threading.Event()

    def distances(
        self, live: LiveState, groups: Sequence[int], scratch: Scratch
    ) -> list[NDArray[np.float64]]:
        """Of all partitions of each of these groups, arrays parallel to `groups`. Compares those that it does not know.

        NaN or Inf only where values were found not to be finite just now.
        """
        spans = [slice(int(self._layout.base[g]), int(self._layout.base[g + 1])) for g in groups]
        unknown = np.zeros(self._layout.partitions, dtype=bool)
        for span in spans:
            unknown[span] = self._unknown[span] | ~np.isfinite(self._known[span])
        ids = np.flatnonzero(unknown)
        if ids.size:
            self._known[ids] = live.distances_at(ids, self._norm, scratch)
            self._unknown[ids] = False
        return [self._known[span].copy() for span in spans]

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
        """Compare the next partitions of these groups (ascending): `share` of them by bytes, in (0, 1], or fewer if
        interrupted.
        """
        if groups is not self._groups:
            self._groups = groups
            self._nbytes = sum(self._layout.groups[g].tensors[0].nbytes for g in groups)
        if not groups:
            return
        scratch = Scratch()
        for ids in self._pieces(groups, share * self._nbytes):
            if self._interrupted.is_set():
                return
            changes = self._changes
            found = live.distances_at(ids, self._norm, scratch)
            if changes == self._changes:
                self._known[ids] = found
                self._unknown[ids] = False
            self._next = int(ids[-1]) + 1

    def _pieces(self, groups: Sequence[int], most: float) -> Iterator[Ids]:
        """Partitions of these groups in order, beginning with the next one to be looked at: each once at most, and of
        no more bytes than `most` and one partition. A piece, ascending, may have some of several groups.
        """
        at, base = self._next, self._layout.base
        begin = bisect.bisect_left(groups, int(np.searchsorted(base, at, side="right")) - 1)
        if begin == len(groups):
            begin = at = 0
        piece: list[Ids] = []
        room = _PIECE
        for turn in range(begin, begin + len(groups) + 1):
            g = groups[turn % len(groups)]
            start, stop = int(base[g]), int(base[g + 1])
            if turn == begin:
                start = max(start, at)
            elif turn == begin + len(groups):
                stop = min(stop, at)
            if turn == len(groups) and piece:
                yield np.concatenate(piece)  # ids begin again
                piece, room = [], _PIECE
            group = self._layout.groups[g]
            nbytes = max(1, group.rows_per_partition * group.tensors[0].row_bytes)
            while start < stop and most > 0:
                end = min(stop, start + max(1, int(min(room, most) // nbytes)))
                piece.append(np.arange(start, end))
                most -= (end - start) * nbytes
                room -= (end - start) * nbytes + _GROUP
                start = end
                if room <= 0:
                    yield np.concatenate(piece)
                    piece, room = [], _PIECE
            if most <= 0:
                break
        if piece:
            yield np.concatenate(piece)
