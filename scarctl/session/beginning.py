"""Make what a loop does before the batches of an epoch happen once, although a resumed loop repeats it.

A run that was stopped within an epoch resumes with that epoch. Its loop steps a schedule, resets a meter or loads
weights again, before it asks for the next batch. The restored state has the effect of that already. So the state from
before the repetition is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scarctl.session.parts import Parts
from scarctl.state.torch_dtypes import plain, private, torched


class Beginning:
    """The state of one session right before its loop repeats the beginning of an epoch."""

    def __init__(self, parts: Parts, finish: Callable[[], bool]) -> None:
        """Take the session's parts. finish: ends the current checkpoint."""
        self._adapter = parts.adapter
        self._binding = parts.binding
        self._opening = parts.opening
        self._together = parts.together
        self._gate = parts.gate
        self._finish = finish
        self._kept: Any = None
        self._counters: list[int] = []

    def keep(self) -> None:
        """Keep the state, before the loop repeats anything."""
        self._kept = private((self._adapter.capture_early(), self._adapter.capture_late()))
        engine = self._opening.engine
        self._counters = [] if engine is None else self._binding.live(engine.arena).all_counters()

    def put_back(self) -> str | None:
        """Put the state back. Return why that is incomplete, or None.

        Parameters are loaded from the arena if one was written to. Among ranks their values stay as they are.
        """
        kept, self._kept = self._kept, None
        engine = self._opening.engine
        if kept is None or engine is None:
            return None
        state: Any = torched(plain(kept))
        with self._gate.held():
            self._finish()
            live = self._binding.live(engine.arena)
            changed = live.written(self._counters)
            if changed and not self._together.several:
                everything = np.arange(engine.layout.partitions)
                live.load(everything)
                engine.equal(everything)
            self._adapter.restore(*state)
        if changed and self._together.several:
            return "the loop changes weights before the first batch of an epoch, and does so again after a resume"
        return None
