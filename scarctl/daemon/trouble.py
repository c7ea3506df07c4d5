"""Report to a session that its store cannot be written, and that it can be written again."""

from __future__ import annotations

import math
import time
from typing import Any

from scarctl.errors import ScarError

_AGAIN = 60.0
"""Seconds after which a store that fails again is reported again."""


class Trouble:
    """Turns the saving thread's newest error into messages for the session. Not thread-safe."""

    def __init__(self) -> None:
        self._reported: str | None = None
        """Kind of the reported error; None while no error is reported."""
        self._next = -math.inf
        """Time before which no other error is reported."""

    def look(self, error: ScarError | None) -> dict[str, Any] | None:
        """Return a message if there is news; None otherwise. error: the newest since the last success."""
        now = time.monotonic()
        if error is None:
            if self._reported is None:
                return None
            self._reported = None
            return {"note": "the store can be written again"}
        if error.kind == self._reported or now < self._next:
            return None
        self._reported, self._next = error.kind, now + _AGAIN
        return {"warn": f"saving fails, and is retried; copies wait in this host's memory: {error}"}
