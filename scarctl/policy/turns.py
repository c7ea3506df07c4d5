"""Decide when the store's turn is: when it gets copies from memory, and whether it gets all of them.

If everything that has changed reaches the store within `max_lag` seconds, the store gets all of it, every `max_lag`
seconds: a whole state, of one step. Otherwise it gets what changed most, as much as `fraction` says, one turn after the
other. They come as fast as its measured bandwidth allows, and a whole state only now and then. If the interval
is a setting, each turn is due at its multiple, and is of the size that `fraction` says (Qiao et al., ICML 2019).
All times are seconds on one monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import IntEnum

from scarctl.util.text import human_bytes, span

SHARE = 0.8
"""Usable share of the measured bandwidth. The rest is a reserve for neighbours, the file system and collecting."""
FULL_EVERY = 20.0
"""Least time between two whole states of a large state, in times of sending one."""
MAX_TURN = 600.0
"""Seconds in which all of the state should reach the store once."""
DAY = 86_400.0
PRIVATE, PARTS = 64 << 20, 8
"""One commit of a part has at most `PRIVATE` bytes, or one of `PARTS` parts of the state: they are copied first."""
REQUESTS, REQUESTS_WHOLE = 13, 32
"""Requests to a remote store per commit of a part, and of the whole state, about, collection included."""
LEAST = 1 / 4
"""Least size of a request, as a share of a turn's, from which the bandwidth is measured: smaller ones measure the
store's fixed time per commit."""

_NEW = 0.3  # weight of a new measurement


def part_requests(nbytes: int, state: int) -> int:
    """Return the requests of a part of `nbytes` bytes, of a state of `state` bytes."""
    return REQUESTS * max(1, math.ceil(nbytes / max(PRIVATE, state // PARTS)))


def per_day(nbytes: int, requests: int) -> str:
    """Return bytes and requests of a day in words."""
    return f"up to {human_bytes(nbytes)} and about {requests:,} requests per day"


class Turn(IntEnum):
    """What the store gets of a memory checkpoint. Of several ranks, the least that one of them wants counts."""

    NOTHING = 0
    PART = 1
    """What changed most."""
    WHOLE = 2
    """All that the store lacks: a state of one step."""


class Turns:
    """Decides for one store. Used by the training thread."""

    def __init__(
        self,
        *,
        state_bytes: int,
        part_bytes: int,
        max_lag: float,
        max_bandwidth: float | None = None,
        whole: bool = False,
    ) -> None:
        """state_bytes, part_bytes: of the whole state, and of one turn. max_bandwidth: bytes per second that saving may
        use on average. whole: every turn has the whole state.
        """
        self.bandwidth: float | None = None
        """Bytes per second that the store accepts; None before the first measurement."""
        self._state_bytes = state_bytes
        self._part_bytes = part_bytes
        self._max_lag = max_lag
        self._most = max_bandwidth
        self._whole = whole
        self.waiting: dict[int, tuple[int, int]] = {}
        """Bytes and step of each request that was not durable at the last look, by number."""
        self._busy_since: float | None = None
        self._looked_at = -math.inf
        self._turn_at = -math.inf
        self._turn_step = -1
        self._turn_bytes = 0
        self._whole_at = -math.inf
        self._pending_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of these."""
        return sum(nbytes for nbytes, _ in self.waiting.values())

    def steps(self) -> Sequence[tuple[int, int]]:
        """Return number and step of each of these, in order."""
        return [(number, step) for number, (_, step) in tuple(self.waiting.items())]

    def asked(self, now: float, number: int, nbytes: int, step: int, turn: Turn) -> None:
        """Note that request `number`, for `nbytes` bytes of the state of `step`, waits for the store since `now`."""
        if self._busy_since is None:
            self._busy_since = now
        self.waiting[number] = nbytes, step
        if step != self._turn_step:
            self._turn_step, self._turn_bytes = step, 0
        self._turn_at, self._turn_bytes = now, self._turn_bytes + nbytes  # a turn has one for each encoding
        if turn is Turn.WHOLE:
            self._whole_at = now

    def replaced(self, numbers: Collection[int]) -> None:
        """Note that these requests are never served by themselves, because a later one has all that they had."""
        for number in numbers:
            self.waiting.pop(number, None)

    def soon(self) -> None:
        """Let the next turn be due at once: the store may lack what an earlier process has left in memory."""
        self._turn_at = self._whole_at = -math.inf

    def look(self, now: float, waiting: Collection[int]) -> None:
        """Note which requests are not durable. Call it after every iteration while some are."""
        looked, self._looked_at = self._looked_at, now
        done = self.waiting.keys() - set(waiting)
        nbytes = sum(self.waiting.pop(number)[0] for number in done)
        if not done or self._busy_since is None:
            return
        # It may have ended at any time since the last look.
        ended = (max(self._busy_since, looked) + now) / 2
        if nbytes >= LEAST * self._part_bytes and ended > self._busy_since:
            found = nbytes / (ended - self._busy_since)
            self.bandwidth = (
                found if self.bandwidth is None else self.bandwidth + _NEW * (found - self.bandwidth)
            )
        self._busy_since = ended if self.waiting else None

    def due(self, now: float, pending_bytes: int) -> Turn:
        """Return the turn of a memory checkpoint made `now`. pending_bytes: what the store lacks."""
        self._pending_bytes = pending_bytes
        if self.waiting or not pending_bytes:
            return Turn.NOTHING
        if now < self._turn_at + self._seconds(self._turn_bytes):
            return Turn.NOTHING
        sending = self._seconds(pending_bytes)
        if self._whole or sending <= self._max_lag:
            return Turn.WHOLE if now >= self._whole_at + self._max_lag else Turn.NOTHING
        whole = now >= self._whole_at + FULL_EVERY * self._seconds(self._state_bytes)
        return Turn.WHOLE if whole else Turn.PART

    def room(self, seconds: float) -> int:
        """Return the bytes of the next part: what the store takes until the next memory checkpoint, in `seconds`.

        At least those of a usual part. If all parts had that size, the store would wait for memory most of the time.
        """
        rates = [rate for rate in (self._most, SHARE * self.bandwidth if self.bandwidth else None) if rate]
        return max(self._part_bytes, min(self._state_bytes, int(min(rates, default=0.0) * seconds)))

    @property
    def small(self) -> bool:
        """Whether the whole state reaches the store within `max_lag`, as far as is known."""
        return self._whole or self._seconds(self._state_bytes) <= self._max_lag

    @property
    def turn_seconds(self) -> float:
        """Seconds in which all of the state is saved once, without the whole states between parts."""
        if self.small:
            return self._max_lag
        turns = math.ceil(self._state_bytes / max(1, self._part_bytes))
        return turns * self._seconds(self._part_bytes)

    @property
    def part_seconds(self) -> float | None:
        """Seconds that the store takes for a usual part; None before the first measurement."""
        return None if self.bandwidth is None else self._part_bytes / self.bandwidth

    @property
    def known(self) -> bool:
        """Whether it is known how fast the store is, or may be used."""
        return self.bandwidth is not None or self._most is not None

    @property
    def bound(self) -> str:
        """What sets that: "max_bandwidth", or the store's "bandwidth"."""
        measured = SHARE * self.bandwidth if self.bandwidth else math.inf
        return "max_bandwidth" if self._most is not None and self._most < measured else "bandwidth"

    @property
    def daily(self) -> tuple[int, int]:
        """Most bytes of the state that the store gets per day, and the number of its requests."""
        if self.small:
            turns = DAY / self._max_lag
            return int(self._state_bytes * turns), int(turns) * REQUESTS_WHOLE
        turns = DAY / max(self._seconds(self._part_bytes), 1.0)
        return int(self._part_bytes * turns), int(turns) * part_requests(self._part_bytes, self._state_bytes)

    @property
    def backlog_seconds(self) -> float:
        """Seconds in which all that the store lacked of the newest memory checkpoint reaches it."""
        return self._seconds(self._pending_bytes)

    @property
    def told(self) -> str:
        """What the store gets, with bytes and requests per day, in words."""
        nbytes, requests = self.daily
        what = f"what changed most, all of the state in about {span(self.turn_seconds)}"
        if self.small:
            what = f"the whole state every {span(self._max_lag)}"
        return f"{what}: {per_day(nbytes, requests)}"

    def _seconds(self, nbytes: int) -> float:
        """Return the seconds that these bytes may take; 0 if nothing is known."""
        found = 0.0 if self._most is None else nbytes / self._most
        if self.bandwidth:
            found = max(found, nbytes / (SHARE * self.bandwidth))
        return found
