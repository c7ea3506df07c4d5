"""Compute distances between checkpoints, a piece after every iteration, so that a checkpoint only has to copy.

If looks keep up, every partition is compared once between two checkpoints. A partition that no look has reached since
it was copied is compared on request. So a distance is up to an interval old, and partitions compared early seem to have
moved slightly less than those compared late. The order shifts from one interval to the next.

No thread waits for a comparison, not even the optimizer, which may write while partitions are read here. Then a
distance is off by part of one step. That is harmless, because the copies themselves are read under synchronization.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from scarctl.checkpoint.distance import Norm, Scratch
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.row_copies import is_gpu
from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids

_PIECE = 4 << 20
"""Bytes of parameters after which a waiting checkpoint gets its turn."""
_GPU_PIECE = 64 << 20
"""The same for a state on a GPU, which reads this much faster than the calls for small pieces are made."""
_GROUP = 32 << 10
"""Fixed cost of comparing a group, as the bytes that are compared in the same time."""


class Sweep:
    """Newest distances of all partitions. One look at a time."""

    def __init__(self, layout: Layout, norm: Norm) -> None:
        self._layout = layout
        self._norm = norm
        self._known = np.zeros(layout.partitions)
        self._unknown = np.ones(layout.partitions, dtype=bool)
        """Partitions not compared since they were last copied: their distance is unknown, not 0."""
        self._next = 0
        """The partition at which the next look begins."""
        self._changes = 0
        """Number of calls to `forget`."""
        self._groups: Sequence[int] = ()
        self._nbytes = 0
        """Bytes of the parameters of these groups, which looks compare."""
        self._interrupted = threading.Event()

    def distances(
        self, live: LiveState, groups: Sequence[int], scratch: Scratch
    ) -> list[NDArray[np.float64]]:
        """Return the distances of all partitions of each group: float64 arrays parallel to `groups`.

        Compares the unknown ones first. NaN or Inf only where this call found values that are not finite.
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
        """Mark partitions `ids` as unknown, because they were copied, or changed without a step."""
        self._changes += 1
        self._unknown[ids] = True

    def interrupt(self) -> None:
        """End a running look soon."""
        self._interrupted.set()

    def allow_full_looks(self) -> None:
        """Allow full looks again."""
        self._interrupted.clear()

    def look(self, live: LiveState, groups: Sequence[int], share: float) -> None:
        """Compare the next partitions of these groups (ascending).

        share: share of their bytes to compare, in (0, 1]; an interrupted look compares fewer.
        """
        if groups is not self._groups:
            self._groups = groups
            self._nbytes = sum(self._layout.groups[g].tensors[0].nbytes for g in groups)
        if not groups:
            return
        scratch = Scratch()
        size = _GPU_PIECE if any(map(is_gpu, live.devices)) else _PIECE
        for ids in self._pieces(groups, share * self._nbytes, size):
            if self._interrupted.is_set():
                return
            changes = self._changes
            found = live.distances_at(ids, self._norm, scratch)
            if changes == self._changes:
                self._known[ids] = found
                self._unknown[ids] = False
            self._next = int(ids[-1]) + 1

    def _pieces(self, groups: Sequence[int], most: float, size: int | None = None) -> Iterator[Ids]:
        """Yield partitions of these groups in order, starting at the next one to compare: each at most once.

        Their bytes exceed `most` by at most one partition. A piece, ascending, may span several groups, and has at
        least `size` bytes, `_PIECE` by default.
        """
        size = size or _PIECE
        at, base = self._next, self._layout.base
        begin = bisect.bisect_left(groups, int(np.searchsorted(base, at, side="right")) - 1)
        if begin == len(groups):
            begin = at = 0
        piece: list[Ids] = []
        room = size
        for turn in range(begin, begin + len(groups) + 1):
            g = groups[turn % len(groups)]
            start, stop = int(base[g]), int(base[g + 1])
            if turn == begin:
                start = max(start, at)
            elif turn == begin + len(groups):
                stop = min(stop, at)
            if turn == len(groups) and piece:
                yield np.concatenate(piece)  # ids restart from the first group
                piece, room = [], size
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
                    piece, room = [], size
            if most <= 0:
                break
        if piece:
            yield np.concatenate(piece)
