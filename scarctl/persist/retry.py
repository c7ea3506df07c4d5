"""Decide the persister's next action: a pure state machine that gives instructions, without files or clock.

Serving a request serves all earlier ones. After a temporary failure, saving is retried after a growing pause. A
permanent failure (another writer has taken over) halts it. Requests then stay.

All times are seconds on one monotonic clock, and arrive with the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FIRST_PAUSE = 0.1
"""Shortest pause before another attempt, in seconds."""
LONGEST_PAUSE = 30.0
"""Longest pause between two attempts, in seconds."""


class Phase(Enum):
    """The machine's phase."""

    IDLE = "idle"
    BUSY = "busy"
    """A request is being served."""
    PAUSED = "paused"
    """The store failed; the next attempt follows after a pause."""
    HALTED = "halted"
    """The store failed permanently: saving has ended."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Persist:
    """Serve this request, then call `Machine.persisted` or `Machine.failed`."""

    number: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Call `Machine.tick` at this time."""

    at: float


@dataclass(frozen=True, slots=True)
class Halt:
    """Log that saving has ended permanently."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The machine has stopped."""


Instruction = Persist | Wake | Halt | Stopped


@dataclass(slots=True)
class Machine:
    """The persister's state. A method for each event returns the instructions to carry out, in order."""

    phase: Phase = Phase.IDLE
    waiting: int = 0
    """Number of the newest request that is not durable; 0 if none waits."""
    failures: int = 0
    """Number of consecutive failures."""
    stopping: bool = False
    resume_at: float = 0.0

    def asked(self, number: int) -> list[Instruction]:
        """Note the newest request that waits; 0 for none."""
        self.waiting = number
        return self._next()

    def persisted(self, number: int) -> list[Instruction]:
        """Note that this request is durable, as all earlier ones are."""
        if self.waiting <= number:
            self.waiting = 0
        self.failures = 0
        self.phase = Phase.IDLE
        return self._next()

    def failed(self, now: float, *, retryable: bool, jitter: float = 0.0) -> list[Instruction]:
        """Note that serving a request failed. `jitter` in [0, 1) spreads the pauses of many hosts."""
        self.failures += 1
        if not retryable:
            self.phase = Phase.HALTED
            return [Halt(), *self._next()]
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 16))
        self.resume_at = now + pause * (1 + jitter) / 2
        self.phase = Phase.PAUSED
        return self._next()

    def tick(self, now: float) -> list[Instruction]:
        """Note the time."""
        if self.phase is Phase.PAUSED and now >= self.resume_at:
            self.phase = Phase.IDLE
        return self._next()

    def hurry(self) -> list[Instruction]:
        """Retry at once: a caller waits."""
        if self.phase is Phase.PAUSED:
            self.phase = Phase.IDLE
        return self._next()

    def stop(self) -> list[Instruction]:
        """Stop once the current request has ended."""
        self.stopping = True
        return self._next()

    def _next(self) -> list[Instruction]:
        if self.phase in (Phase.BUSY, Phase.STOPPED):
            return []
        if self.stopping:
            self.phase = Phase.STOPPED
            return [Stopped()]
        if self.phase is Phase.PAUSED:
            return [Wake(self.resume_at)]
        if self.phase is Phase.IDLE and self.waiting:
            self.phase = Phase.BUSY
            return [Persist(self.waiting)]
        return []
