"""Hold an arena's words: numbers in its header about the run that writes it, its progress, and what is to be saved."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.header import FIELDS
from scarctl.state.encodings import ENCODINGS, Encoding
from scarctl.state.version import NEVER

_EPOCH, _HEAD_STEP, _PID, _SEALED, _ERRORS, _BASE_EPOCH, _INTERVAL, _OVERHEAD, _FAILED_SAVES = range(9)
_CURRENT, _MOMENT, _ASKED, _ASKED_WHOLE, _SERVED, _KEPT, _ENCODING, _LAST = range(9, 17)
HOLD, HOLD_SLOT, HOLD_UNTIL = range(17, 20)


class Fields:
    """The words, int64 in a mapped file. Another process may read each at any time."""

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
        """Version of the newest state that the store has as a whole."""
        return int(self._words[_SEALED])

    def seal(self, version: int) -> None:
        """Note that the newest state that the store has as a whole is of `version`."""
        self._words[_SEALED] = version

    @property
    def kept(self) -> int:
        """The newest moment of which the store has everything, the extras too; 0 for none."""
        return int(self._words[_KEPT])

    def keep(self, moment: int) -> None:
        """Note that the store has everything of this moment, the extras too."""
        self._words[_KEPT] = moment

    @property
    def current(self) -> int:
        """Number of the slot with the newest complete state."""
        return int(self._words[_CURRENT])

    @property
    def newest_moment(self) -> int:
        """The newest moment that a checkpoint was begun for, complete or not."""
        return int(self._words[_MOMENT])

    @property
    def last(self) -> int:
        """The moment that the process copied because it, or its host, was about to end; 0 for none."""
        return int(self._words[_LAST])

    def note_last(self, moment: int) -> None:
        """Note that the process has copied this moment because it, or its host, is about to end."""
        self._words[_LAST] = moment

    # -- what is to be saved --------------------------------------------------------------------------------------

    @property
    def asked(self) -> int:
        """Number of the newest request; requests count from 1."""
        return int(self._words[_ASKED])

    @property
    def served(self) -> int:
        """Number of the newest request that is durable in the store, as all earlier ones are."""
        return int(self._words[_SERVED])

    @property
    def wants_whole(self) -> bool:
        """Whether a request for everything waits."""
        return bool(self._words[_ASKED_WHOLE] > self._words[_SERVED])

    @property
    def waits(self) -> bool:
        """Whether a request waits."""
        return self.asked > self.served

    def serve(self, number: int) -> None:
        """Note that this request and all earlier ones are durable."""
        self._words[_SERVED] = max(number, self.served)

    @property
    def encoding(self) -> Encoding:
        """How the store keeps copies that a request wants encoded."""
        return ENCODINGS[int(self._words[_ENCODING]) % len(ENCODINGS)]

    def note_encoding(self, encoding: Encoding) -> None:
        """Note how the store keeps such copies."""
        self._words[_ENCODING] = ENCODINGS.index(encoding)

    def _ask(self, whole: bool) -> int:
        number = self.asked + 1
        if whole:
            self._words[_ASKED_WHOLE] = number
        self._words[_ASKED] = number  # last: what it wants is complete
        return number

    def _flip(self, slot: int) -> None:
        self._words[_CURRENT] = slot

    def _next_moment(self) -> int:
        self._words[_MOMENT] += 1
        return self.newest_moment

    def adopt_moment(self, moment: int) -> None:
        """Count moments from `moment` on: the copies are those of another arena."""
        self._words[_MOMENT] = max(moment, self.newest_moment)

    def _clear(self) -> None:
        """Reset the words that describe copies, for a process that begins without any."""
        self.take_over()
        self.seal(NEVER)
        self.keep(0)
        self.note_last(0)
        self.serve(self.asked)
        self._words[HOLD] = 0
