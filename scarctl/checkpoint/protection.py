"""Decide which copies must not be replaced yet, because the persister is reading them, or because a seal waits."""

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
"""Checkpoint periods without a read after which the protected copies are given up."""
_LEAST = 1.0
"""Least time without a read before that, in seconds: a store may answer more slowly than a training loop steps."""
_MOST = 300.0
_NEW = 0.3  # weight of a new measurement


class Protection:
    """The protected copies of one session. All times are seconds on one monotonic clock.

    While the persister reads slowly, its copies are protected. If it has stopped, no copy is protected, so that copies
    in memory stay as new as with a fast store. The interrupted hand-over is read again later, with the newer copies.
    The patience doubles each time, so that a store with long pauses still finishes a hand-over.
    """

    def __init__(
        self, arena: Arena, queue: HandOverQueue, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._arena = arena
        self._queue = queue
        self._clock = clock
        self._waiting: dict[int, int] = {}
        """Versions of queued hand-overs that may not have been read yet, by number."""
        self._seal: int | None = None
        """Number of the newest hand-over that seals the state; None once it has been read."""
        self._sealed = NEVER
        """Version of the newest seal."""
        self._looked_at: float | None = None
        self._period: float | None = None
        """Seconds between two checkpoints."""
        self._moved = -1, -math.inf
        """The persister's count of reads, and the time of its last change."""
        self._patience = _LEAST
        self._gave_up: int | None = None
        """The persister's count of reads when its copies were given up."""

    def look(self) -> None:
        """Note that a regular checkpoint begins. Call it once for each."""
        now = self._clock()
        if self._looked_at is not None:
            seconds = now - self._looked_at
            before = seconds if self._period is None else self._period
            self._period = before + _NEW * (seconds - before)
        self._looked_at = now

    def queued(self, number: int, version: int, *, sealed: bool) -> list[int]:
        """Note a new hand-over. Remove the earlier ones that it makes superfluous from the queue, and return them.

        Their copies that have no newer one are saved together with this hand-over: see `Persister.persist`.
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
        """Return which copies must not be replaced: bool of shape (layout.partitions,). pending: as `Arena.pending`.

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
        """Return whether a seal was given up and the store has time for another. True once for each such seal.

        Raises ScarError if the queue cannot be read.
        """
        if self._sealed == NEVER or self._queue.numbers():
            return False
        owed = self._arena.sealed < self._sealed
        self._sealed = NEVER
        return owed

    def forget_seal(self) -> None:
        """Forget the newest seal, because copies are about to be replaced by older ones."""
        self._sealed = NEVER

    def _seal_waits(self) -> bool:
        """Return whether the persister has not read the newest seal completely.

        Partitions that the seal found unchanged are not pending. With a newer copy of one of them, the state would not
        be of one step any more.
        """
        # A new daemon gives waiting hand-overs larger numbers, and no other hand-over follows a seal.
        if self._seal is not None and (
            self._arena.taken >= self._seal or max(self._queue.numbers(), default=-1) < self._seal
        ):
            self._seal = None
        return self._seal is not None

    def _has_stopped(self) -> bool:
        """Return whether the last read of the persister is so long ago that its copies are given up."""
        now, progress = self._clock(), self._arena.progress
        if progress != self._moved[0]:
            self._moved = progress, now
            longer = self._gave_up is not None
            self._patience = min(_MOST, self._patience * 2) if longer else max(_LEAST, self._patience / 2)
            self._gave_up = None
        return now - self._moved[1] > max(self._patience, _INTERVALS * (self._period or 0.0))
