"""Note that the host is about to shut down: memory then stays as it is, and is saved in the best order."""

from __future__ import annotations

import math
import time


class Leaving:
    """One session's notes for an evacuation (`scarctl.persist.evacuation`)."""

    def __init__(self) -> None:
        self._until = -math.inf

    def begin(self, deadline: float) -> None:
        """Note that the host shuts down at `deadline`, on the monotonic clock. Regular checkpoints pause until then."""
        self._until = deadline

    @property
    def now(self) -> bool:
        """Whether the host is about to shut down."""
        return time.monotonic() < self._until
