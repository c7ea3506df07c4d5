"""Decide the persister's next action: a pure state machine that gives instructions, without files or clock.

Hand-overs are saved one at a time, in their order. After a temporary failure, saving is retried after a growing pause.
A permanent failure (another writer has taken over) halts it. Hand-overs then stay in the queue.

All times are seconds on one monotonic clock, and arrive with the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

FIRST_PAUSE = 0.1
"""Shortest pause before another attempt, in seconds."""
LONGEST_PAUSE = 30.0
"""Longest pause between two attempts, in seconds."""


class Phase(Enum):
    """The machine's phase."""

    IDLE = "idle"
    BUSY = "busy"
    """A hand-over is being saved."""
    PAUSED = "paused"
    """The store failed; the next attempt follows after a pause."""
    HALTED = "halted"
    """The store failed permanently: saving has ended."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Persist:
    """Save this hand-over, then call `Machine.persisted` or `Machine.failed`."""

    number: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove this hand-over from the queue: it is durable."""

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


Instruction = Persist | Forget | Wake | Halt | Stopped


@dataclass(slots=True)
class Machine:
    """The persister's state. A method for each event returns the instructions to carry out, in order."""

    phase: Phase = Phase.IDLE
    waiting: list[int] = field(default_factory=list)
    """Numbers of hand-overs that are not durable, in order. The first one is being saved."""
    failures: int = 0
    """Number of consecutive failures."""
    stopping: bool = False
    resume_at: float = 0.0

    def queued(self, numbers: Iterable[int]) -> list[Instruction]:
        """Note all hand-overs in the queue, in order."""
        busy = self.waiting[:1] if self.phase is Phase.BUSY else []
        self.waiting = busy + [n for n in numbers if n not in busy]
        return self._next()

    def persisted(self, number: int) -> list[Instruction]:
        """Note that the hand-over being saved is durable."""
        self.waiting = [n for n in self.waiting if n != number]
        self.failures = 0
        self.phase = Phase.IDLE
        return [Forget(number), *self._next()]

    def failed(self, now: float, *, retryable: bool, jitter: float = 0.0) -> list[Instruction]:
        """Note that saving a hand-over failed. `jitter` in [0, 1) spreads the pauses of many hosts."""
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
        """Stop once the current hand-over has ended."""
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
            return [Persist(self.waiting[0])]
        return []
