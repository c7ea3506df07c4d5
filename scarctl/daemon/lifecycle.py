"""Decide when the daemon releases a run, and when it ends: a pure state machine.

A run is attached while its training process lives. When that process dies, the run is orphaned: the daemon finishes
saving, then releases the run, which takes until the current write has ended. A daemon without runs ends after a while,
unless other hosts may come for the memory here.
Times are seconds on one monotonic clock, and arrive with the events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

LINGER = 0.5
"""Idle timeout in seconds before the first run attaches."""
BETWEEN = 5.0
"""Idle timeout in seconds after the last run was closed: the next run may begin soon."""
RETURN = 60.0
"""Idle timeout in seconds after a training process has died: a restarted one need not wait for a new daemon."""
LAST_WORDS = 3.0
"""Seconds to wait for training processes after a SIGTERM. If one runs longer, the signal was for the daemon alone."""
LAST_SAVES = 20.0
"""Seconds after a SIGTERM that saving may take: most systems send SIGKILL after 30."""


class Phase(Enum):
    """A run's phase."""

    ATTACHED = "attached"
    ORPHANED = "orphaned"
    CLOSING = "closing"
    """The run is being released; its store is not free yet."""


@dataclass(frozen=True, slots=True)
class Release:
    """Finish the run's current write, release its store and its arena, then call `Lifecycle.released`."""

    run: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the daemon."""


Instruction = Release | Exit


@dataclass(slots=True)
class Lifecycle:
    """All runs of one daemon. A method for each event, some of which return what to do, in order."""

    runs: dict[str, Phase] = field(default_factory=dict)
    idle_since: float | None = None
    held_until: float = 0.0
    braced_until: float = 0.0
    patience: float = LINGER
    """Current idle timeout, in seconds."""
    terminated: float | None = None
    """Time of the first SIGTERM; None before it."""
    stopping: bool = False
    """Whether new runs are refused."""
    ended: bool = False

    def attached(self, run: str) -> None:
        """Note that a training process has claimed a new run."""
        assert run not in self.runs
        assert not self.stopping
        self.runs[run] = Phase.ATTACHED
        self.idle_since, self.held_until, self.patience = None, 0.0, BETWEEN

    def trainer_gone(self, run: str) -> None:
        """Note that the run's training process ended without closing its run."""
        if self.runs.get(run) is Phase.ATTACHED:
            self.runs[run] = Phase.ORPHANED
            self.patience = RETURN

    def settled(self, run: str) -> list[Instruction]:
        """Note that all requests of the run are durable, or that saving failed permanently."""
        return self._release(run) if self.runs.get(run) is Phase.ORPHANED else []

    def detached(self, run: str) -> list[Instruction]:
        """Note that the training process has closed the run, or that another process claims it."""
        return self._release(run)

    def released(self, run: str) -> list[Instruction]:
        """Note that the run's store is free."""
        self.runs.pop(run, None)
        return self._end_if_stopping()

    def hold(self, until: float) -> None:
        """Do not end before `until`, unless a run attaches and ends first: a training process is about to start."""
        self.held_until = until

    def brace(self, until: float) -> None:
        """Stay until the host shuts down at `until`, even after a SIGTERM: runs and commands may need the daemon."""
        self.braced_until = max(self.braced_until, until)

    def stop(self) -> list[Instruction]:
        """Release all runs, then end. Waiting requests stay in memory."""
        self.stopping = True
        releases = [instruction for run in self.runs for instruction in self._release(run)]
        return releases + self._end_if_stopping()

    def terminate(self, now: float) -> list[Instruction]:
        """Note a SIGTERM to the daemon. Perhaps all processes have it, and some are still saving their last step."""
        if self.terminated is None:
            self.terminated = now
        return self.tick(now)

    def tick(
        self, now: float, *, hosting: bool = False, wanted: Callable[[], bool] = lambda: False
    ) -> list[Instruction]:
        """Note the time. hosting: a peer sends to a replica on this host.

        wanted: asked before the idle daemon ends: whether other hosts may still come for this host's memory.
        """
        if self.terminated is not None and not self.stopping:
            attached = Phase.ATTACHED in self.runs.values()
            end = self.terminated + (LAST_WORDS if attached else LAST_SAVES)
            if not self.runs or now >= max(end, self.braced_until):
                return self.stop()
        if self.runs:
            return []
        if hosting:
            self.idle_since = None
            return []
        if self.idle_since is None:
            self.idle_since = now
        if now < max(self.idle_since + self.patience, self.held_until):
            return []
        if wanted():
            self.idle_since, self.patience = now, RETURN
            return []
        return self._end()

    def _release(self, run: str) -> list[Instruction]:
        if self.runs.get(run) not in (Phase.ATTACHED, Phase.ORPHANED):
            return []
        self.runs[run] = Phase.CLOSING
        return [Release(run)]

    def _end_if_stopping(self) -> list[Instruction]:
        return self._end() if self.stopping and not self.runs else []

    def _end(self) -> list[Instruction]:
        if self.ended:
            return []
        self.stopping = self.ended = True
        return [Exit()]
