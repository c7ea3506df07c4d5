"""How long the daemon keeps a run, and when it ends: a pure state machine, like `scarctl.daemon.state`.

A run is attached while its training process lives. When that dies the run is orphaned: the daemon finishes saving, then
lets the run go. A daemon without runs ends after a short while. Times are seconds on one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

LINGER = 0.5
"""Seconds without any run after which the daemon ends: a trainer that restarts at once finds it."""


class Phase(Enum):
    """A run's phase."""

    ATTACHED = "attached"
    ORPHANED = "orphaned"


# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """A training process claims this run."""

    run: str


@dataclass(frozen=True, slots=True)
class TrainerGone:
    """The run's training process ended without saying so."""

    run: str
    durable: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """Nothing of the run waits any more, or it failed for good."""

    run: str


@dataclass(frozen=True, slots=True)
class Detached:
    """The training process has closed the run."""

    run: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the daemon to end: it lets all runs go."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float


Event = Attached | TrainerGone | Settled | Detached | StopAsked | Tick

# -- instructions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Release:
    """Stop saving this run, free its store and its arena."""

    run: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the daemon."""


Instruction = Release | Exit


@dataclass(slots=True)
class Lifecycle:
    """All runs of one daemon. `handle` is the only way to change it."""

    runs: dict[str, Phase] = field(default_factory=dict)
    idle_since: float | None = None
    stopping: bool = False

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; returns what to do, in order."""
        match event:
            case Attached(run):
                self.runs[run] = Phase.ATTACHED
                self.idle_since = None
            case TrainerGone(run, durable):
                if run in self.runs:
                    self.runs[run] = Phase.ORPHANED
                    if durable:
                        return self._release(run)
            case Settled(run):
                if self.runs.get(run) is Phase.ORPHANED:
                    return self._release(run)
            case Detached(run):
                if run in self.runs:
                    return self._release(run)
            case StopAsked():
                self.stopping = True
                releases: list[Instruction] = []
                for run in list(self.runs):
                    releases += self._release(run)
                return [*releases, Exit()]
            case Tick(now):
                return self._tick(now)
        return []

    def _release(self, run: str) -> list[Instruction]:
        del self.runs[run]
        return [Release(run)]

    def _tick(self, now: float) -> list[Instruction]:
        if self.runs:
            return []
        if self.idle_since is None:
            self.idle_since = now
        return [Exit()] if now - self.idle_since >= LINGER else []
