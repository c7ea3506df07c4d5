"""Undo a resumed loop's repetition of its work before the batches of an epoch, so that the work counts once.

A run that was stopped within an epoch resumes with that epoch. Its loop again steps a schedule, resets a meter or loads
weights before it requests the next batch. The restored state already includes the effect. So the state from before the
repetition is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.live_state import LiveState
from scarctl.errors import LayoutMismatch
from scarctl.session.parts import Parts
from scarctl.state.torch_dtypes import plain, private, torched

_WEIGHTS = "the loop changes weights before the first batch of an epoch, and does so again after a resume"
_SLOTS = "the loop makes or drops optimizer state before the first batch of an epoch, and does so again after a resume"


class Beginning:
    """The state of one session right before its loop repeats the beginning of an epoch."""

    def __init__(self, parts: Parts, finish: Callable[[], bool]) -> None:
        """Use the session's parts. finish: ends the current checkpoint."""
        self._adapter = parts.adapter
        self._binding = parts.binding
        self._opening = parts.opening
        self._together = parts.together
        self._gate = parts.gate
        self._finish = finish
        self._kept: Any = None
        self._counters: list[int] = []
        self._differing: NDArray[np.bool_] | None = None
        """Partitions that already differed from the arena, or were missing there: they changed between the resume and
        the loop."""

    def keep(self) -> None:
        """Keep the state, before the loop repeats anything."""
        self._kept = private((self._adapter.capture_early(), self._adapter.capture_late()))
        self._counters, self._differing = [], None
        with self._gate.held():
            self._finish()  # a resume may still be filling the arena
        engine = self._opening.engine
        live = None if engine is None else self._live(engine)
        if live is not None:
            lacking = ~live.arena.intact()
            self._counters, self._differing = live.all_counters(), live.changed() | lacking

    def put_back(self) -> str | None:
        """Put the state back. Return why that is incomplete, or None.

        Partitions that were written to, counted by torch or not, are loaded from the arena. Among ranks their values
        stay as they are.
        """
        kept, self._kept = self._kept, None
        engine = self._opening.engine
        if kept is None or engine is None:
            return None
        state: Any = torched(plain(kept))
        with self._gate.held():
            self._finish()
            live = self._live(engine)
            if live is None or self._differing is None:
                return _SLOTS
            changed = np.flatnonzero(live.changed() & ~self._differing)
            before = set(live.layout.group_of(np.flatnonzero(self._differing)).tolist())
            kept_back = self._together.several and bool(changed.size)
            if changed.size and not kept_back:
                live.load(changed)
            self._adapter.restore(*state)
            # Partitions that already differed from the arena have no copy.
            if kept_back or before & live.written(self._counters):
                return _WEIGHTS
        return None

    def _live(self, engine: Engine) -> LiveState | None:
        try:
            return self._binding.live(engine.arena)
        except LayoutMismatch:
            return None
