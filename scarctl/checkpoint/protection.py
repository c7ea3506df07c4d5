"""Decide which copies must not change yet: the persister reads them, or a seal was not read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.queue import HandOverQueue
from scarctl.state.version import NEVER

_INTERVALS = 2
"""Intervals without progress of the persister after which its copies are given up."""
_LEAST = 1.0
"""Seconds without progress, at least: a store is slower than a training loop."""
_MOST = 300.0
_NEW = 0.3  # weight of a new measurement


class Protection:
    """Tracks the protected copies of one session. All times are seconds on one monotonic clock.

    Copies that the persister reads are protected while it makes progress, however slow the store is. If it stops, they
    are given up: memory stays as young as with a fast store, and the persister starts again with the newer copies. The
    patience then doubles, so that a store with long pauses finishes at some point.
    """

    def __init__(
        self, arena: Arena, queue: HandOverQueue, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._arena = arena
        self._queue = queue
        self._clock = clock
        self._waiting: dict[int, int] = {}
        """Version of each hand-over that may not have been read yet, by number."""
        self._seal: int | None = None
        """Number of the newest hand-over with a seal; None once it was read."""
        self._sealed = NEVER
        """Version of the newest seal."""
        self._looked_at: float | None = None
        self._period: float | None = None
        """Seconds between two checkpoints."""
        self._moved = -1, -math.inf
        """The persister's count of reads, and the time of its last change."""
        self._patience = _LEAST
        self._gave_up: int | None = None
        """The persister's count of reads when its copies were given up; None: they were not."""

    def look(self) -> None:
        """Note that a regular checkpoint is made. Call it once for each."""
        now = self._clock()
        if self._looked_at is not None:
            seconds = now - self._looked_at
            before = seconds if self._period is None else self._period
            self._period = before + _NEW * (seconds - before)
        self._looked_at = now

    def queued(self, number: int, version: int, *, sealed: bool) -> list[int]:
        """Note a new hand-over, and remove earlier ones from the queue that were not read. Return their numbers.

        Those of their copies that are still the newest are saved together with this hand-over: see `Persister.persist`.
        """
        if not self._waiting:
            self._moved = self._arena.progress, self._clock()
        reading, taken = self._arena.reading, self._arena.taken
        self._waiting = {n: v for n, v in self._waiting.items() if n > taken}
        dropped = [n for n, v in self._waiting.items() if v < version and v != reading]
        for superfluous in dropped:
            self._queue.remove(superfluous)
            del self._waiting[superfluous]
        self._waiting[number] = version
        if sealed:
            self._seal, self._sealed = number, version
        return dropped

    def covers(self, pending: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the copies that must not change: bool of shape (layout.partitions,). pending: see `Arena.pending`.

        Raises ScarError if the queue cannot be read.
        """
        if self._seal_waits():
            protected = np.ones_like(pending)
        elif reading := self._arena.reading:
            protected = pending & (self._arena.version <= reading)
        else:
            protected = np.zeros_like(pending)
        if protected.any() and self._has_stopped():
            self._gave_up = self._arena.progress
            return np.zeros_like(pending)
        return protected

    def owes_seal(self) -> bool:
        """Return whether a seal was given up, and the store has time for another one. True once for each such seal.

        Raises ScarError if the queue cannot be read.
        """
        if self._sealed == NEVER or self._queue.numbers():
            return False
        owed = self._arena.sealed < self._sealed
        self._sealed = NEVER
        return owed

    def forget_seal(self) -> None:
        """Note that older copies are about to replace the present ones. A seal that this discards is not repeated."""
        self._sealed = NEVER

    def _seal_waits(self) -> bool:
        """Return whether a seal was not read yet.

        Partitions that the seal found unchanged are not pending. With a newer copy of one of them, the state would no
        longer be of one step.
        """
        # A new daemon gives waiting hand-overs larger numbers, and no other hand-over follows a seal.
        if self._seal is not None and (
            self._arena.taken >= self._seal or max(self._queue.numbers(), default=-1) < self._seal
        ):
            self._seal = None
        return self._seal is not None

    def _has_stopped(self) -> bool:
        """Return whether the persister made no progress for so long that its copies are given up."""
        now, progress = self._clock(), self._arena.progress
        if progress != self._moved[0]:
            self._moved = progress, now
            longer = self._gave_up is not None
            self._patience = min(_MOST, self._patience * 2) if longer else max(_LEAST, self._patience / 2)
            self._gave_up = None
        return now - self._moved[1] > max(self._patience, _INTERVALS * (self._period or 0.0))
