"""Hold an arena's counters: numbers in its header about the run that writes it, and about its progress."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.header import FIELDS
from scarctl.state.version import NEVER

_EPOCH, _HEAD_STEP, _PID, _SEALED, _ERRORS, _BASE_EPOCH = range(6)
_WHOLE = slice(6, 8)
_TAKEN, _INTERVAL, _OVERHEAD, _FAILED_SAVES, _MOMENT = range(8, 13)


class Fields:
    """The counters, int64 of shape (13,) in a mapped file. Another process may read each at any time."""

    def __init__(self, words: NDArray[np.int64]) -> None:
        assert words.size == len(FIELDS)
        self._words = words

    @property
    def epoch(self) -> int:
        """Epoch of the process that writes copies."""
        return int(self._words[_EPOCH])

    @property
    def base_epoch(self) -> int:
        """First epoch of the process that writes copies. A daemon that replaces another one begins a later epoch."""
        return int(self._words[_BASE_EPOCH]) or self.epoch

    def begin_epoch(self, epoch: int, *, again: bool = False) -> None:
        """Save copies in `epoch` from now on.

        again: the process that writes copies has saved in earlier epochs since `base_epoch`, and continues.
        """
        # In this order, a process that dies meanwhile leaves an empty range of epochs: `lifted` lifts nothing.
        if not again:
            self._words[_BASE_EPOCH] = epoch
            self._words[_TAKEN] = 0  # the queue may count from 1 again
        self._words[_EPOCH] = epoch

    @property
    def head_step(self) -> int:
        """Iterations that the training process has finished."""
        return int(self._words[_HEAD_STEP])

    def reach(self, step: int) -> None:
        """Note that the training process has finished `step` iterations."""
        self._words[_HEAD_STEP] = step

    @property
    def pid(self) -> int:
        """Id of the process that writes copies."""
        return int(self._words[_PID])

    def take_over(self, pid: int | None = None) -> None:
        """Note that process `pid` writes copies from now on. The default is this process."""
        self._words[_PID] = os.getpid() if pid is None else pid

    @property
    def errors(self) -> int:
        """Failures in the training process that the run has counted."""
        return int(self._words[_ERRORS])

    def note_errors(self, count: int) -> None:
        """Note the number of failures in the training process that the run has counted."""
        self._words[_ERRORS] = count

    @property
    def failed_saves(self) -> int:
        """Failed attempts to write copies to the store, by whichever process saves them."""
        return int(self._words[_FAILED_SAVES])

    def count_failed_save(self) -> None:
        """Count a failed attempt to write copies to the store."""
        self._words[_FAILED_SAVES] += 1

    def note_pace(self, interval: int, overhead: float | None) -> None:
        """Note the iterations between two checkpoints, and the measured share of time that they take; None: unknown."""
        self._words[_INTERVAL] = interval
        self._words[_OVERHEAD] = 0 if overhead is None else 1 + round(1e6 * overhead)

    @property
    def sealed(self) -> int:
        """Version of the newest sealed commit: all copies were equal to the live values then."""
        return int(self._words[_SEALED])

    def seal(self, version: int) -> None:
        """Note that the newest sealed commit is of `version`."""
        self._words[_SEALED] = version

    @property
    def whole(self) -> str:
        """Name of the commit of the whole state that has all copies: 32 hex digits, "" if they are of several.

        Equal versions are not enough: within one step the state may be saved, changed, and saved again.
        """
        words = self._words[_WHOLE].astype(">i8").tobytes()
        return words.hex() if any(words) else ""

    def name_whole(self, whole: str) -> None:
        """Note the commit of the whole state that has all copies; "" if they are of several."""
        # A process killed between two words leaves a name that no commit has.
        self._words[_WHOLE] = np.frombuffer(bytes.fromhex(whole), ">i8") if whole else 0

    @property
    def moment(self) -> int:
        """Version of the newest memory checkpoint: every copy without a newer one was equal to the live values then."""
        return int(self._words[_MOMENT])

    def note_moment(self, version: int) -> None:
        """Note that a memory checkpoint of `version` is complete; `NEVER`: no copy is newer than its own version."""
        self._words[_MOMENT] = version

    # -- what the persister has read ------------------------------------------------------------------------------

    @property
    def taken(self) -> int:
        """Number of the newest hand-over that the persister has read completely."""
        return int(self._words[_TAKEN])

    def read(self, number: int) -> None:
        """Note that hand-over `number` was read completely."""
        self._words[_TAKEN] = max(number, self.taken)

    def _clear(self) -> None:
        """Reset the counters that describe copies, for a process that begins without any."""
        self.take_over()
        self.seal(NEVER)
        self.name_whole("")
        self.note_moment(NEVER)
        self._words[_TAKEN] = 0
