"""Decide what a link to a peer does next: a pure state machine, like `scarctl.daemon.lifecycle`.

    ABSENT -> CONNECTING -> FULL -> FOLLOWING <-> BEHIND
    any of these -> LOST -> CONNECTING, or after 60 s REPLACED: CONNECTING to the next candidate
    any -> FENCED, CLOSED

Times are seconds on one monotonic clock, and arrive with the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

REPLACED_AFTER = 60.0
"""Seconds without an answer, in which a connection was lost, after which the next candidate is tried."""
BEHIND_AFTER = 10.0
"""Seconds since the last mark, while there is something to send, after which a link counts as behind."""
_PAUSE, _LONGEST_PAUSE = 0.25, 8.0
"""Seconds between attempts to connect. The pause doubles."""


class State(Enum):
    """A link's state."""

    ABSENT = "absent"
    """There is nothing to send yet, or no other host."""
    CONNECTING = "connecting"
    FULL = "full"
    """Everything is being sent, because the peer has no complete replica of this start yet."""
    FOLLOWING = "following"
    BEHIND = "behind"
    LOST = "lost"
    REPLACED = "replaced"
    """Given up; the next candidate is tried at once."""
    FENCED = "fenced"
    """The peer has seen a later epoch: this run has continued elsewhere."""
    CLOSED = "closed"


CONNECTED = (State.FULL, State.FOLLOWING, State.BEHIND)
_ENDED = (State.FENCED, State.CLOSED)


@dataclass(slots=True)
class Link:
    """One link. A method for each event, with the time. `begin` and `tick` return whether to connect to `at` now."""

    candidates: int
    """Number of candidate hosts for this copy."""
    at: int = 0
    """Index of the candidate that is connected, or being tried."""
    state: State = State.ABSENT
    complete: bool = False
    """Whether the candidate has a complete replica of this start."""
    marked_at: float = 0.0
    lost_at: float | None = None
    """Time at which the present candidate was disconnected; None once it has answered a frame since."""
    retry_at: float = 0.0
    pause: float = _PAUSE

    @property
    def ended(self) -> bool:
        """Whether the link has ended permanently."""
        return self.state in _ENDED

    def begin(self, now: float) -> bool:
        """Note that an arena exists to be sent."""
        if self.state is not State.ABSENT or not self.candidates:
            return False
        self.lost_at = now
        return self._connect()

    def accepted(self, now: float, *, complete: bool = False) -> None:
        """Note that the peer waits for copies. complete: it has a complete replica of this start."""
        if self.state is State.CONNECTING:
            self.state, self.complete = State.FOLLOWING if complete else State.FULL, complete
            self.marked_at = now

    def answered(self, _now: float) -> None:
        """Note that the peer has acknowledged a frame: an accepted connection alone may never carry any."""
        if self.state in CONNECTED:
            self.lost_at = None

    def marked(self, now: float) -> None:
        """Note that the peer has acknowledged a mark."""
        if self.state in CONNECTED:
            self.state, self.complete, self.marked_at = State.FOLLOWING, True, now
            self.lost_at, self.pause = None, _PAUSE

    def lost(self, now: float) -> None:
        """Note that the connection has ended, or could not be opened."""
        if self.state is not State.CONNECTING and self.state not in CONNECTED:
            return
        self.state = State.LOST
        if self.lost_at is None:
            self.lost_at = now
        self._pause(now)

    def refused(self, now: float) -> None:
        """Note that the peer cannot keep a replica: it has no room, or a live process uses its place."""
        if self.candidates == 1:
            self.lost(now)
        elif self.state is State.CONNECTING or self.state in CONNECTED:
            self._replace(now)

    def overtaken(self, _now: float) -> None:
        """Note that the peer has seen a later epoch of this run."""
        if not self.ended:
            self.state = State.FENCED

    def close(self, _now: float) -> None:
        """Note that the run has ended."""
        if not self.ended:
            self.state = State.CLOSED

    def hurry(self, _now: float) -> None:
        """Make the next attempt to connect due at once: the owner's host is about to shut down."""
        self.retry_at, self.pause = 0.0, _PAUSE

    def tick(self, now: float, *, waiting: bool = False, spare: bool = True) -> bool:
        """Note the time. waiting: some changes are not sent yet. spare: another candidate has no copy of this run."""
        if self.state is State.FOLLOWING and waiting and now >= self.marked_at + BEHIND_AFTER:
            self.state = State.BEHIND
        elif self.state is State.REPLACED and now >= self.retry_at:
            return self._connect()
        elif self.state is State.LOST and self.lost_at is not None:
            if spare and self.candidates > 1 and now >= self.lost_at + REPLACED_AFTER:
                self._replace(now)
            elif now >= self.retry_at:
                return self._connect()
        return False

    def _connect(self) -> bool:
        self.state = State.CONNECTING
        return True

    def _replace(self, now: float) -> None:
        """Try the next candidate: at once, or after a pause if all were tried."""
        self.state, self.complete = State.REPLACED, False
        self.at = (self.at + 1) % self.candidates
        self.lost_at = self.retry_at = now
        if self.at == 0:
            self._pause(now)

    def _pause(self, now: float) -> None:
        self.retry_at, self.pause = now + self.pause, min(_LONGEST_PAUSE, 2 * self.pause)
