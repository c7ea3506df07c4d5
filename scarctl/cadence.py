"""When the next partial checkpoint is due: pure, fed with what happens and when.

With a number as interval that is every so many iterations. With "auto" the store sets the pace: the interval is the
shortest at which saving takes at most `SHARE` of what the store was measured to take, and of the byte budget if there
is one. All times are seconds on one monotonic clock, and come in with the calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection

FIRST_INTERVAL = 10
"""Used until something was measured."""
LONGEST_INTERVAL = 10_000
SHARE = 0.8
"""Of the measured bandwidth. The rest is for what cannot be planned: neighbours, the file system, a sealed state."""
HYSTERESIS = 1.25
"""The interval becomes shorter only when the shorter one would have this much room."""

_NEW = 0.3  # weight of a new measurement
_OUTLIER = 4.0  # a step longer than so many usual ones (an evaluation) counts as so many


class Cadence:
    """Decides after every iteration whether to save.

    How fast the store is comes from acknowledgements: the bytes of what became durable, over the time since the store
    began with it. They are looked for once per iteration, so what is found counts as done in its middle.
    """

    def __init__(
        self, interval: int | None, *, checkpoint_bytes: int, max_bandwidth: float | None = None
    ) -> None:
        """interval: iterations, None for "auto". checkpoint_bytes: of a usual checkpoint.

        max_bandwidth: bytes per second that saving may use on average.
        """
        self.interval = interval if interval is not None else FIRST_INTERVAL
        """Iterations between two checkpoints, as it is now."""
        self.bandwidth: float | None = None
        """Bytes per second that the store takes; None before the first measurement."""
        self.step_seconds: float | None = None
        """Time of an iteration, None before the first."""
        self._fixed = interval is not None
        self._bytes = checkpoint_bytes
        self._budget = math.inf if max_bandwidth is None else max_bandwidth
        self._waiting: dict[int, tuple[int, int]] = {}  # number -> (step, bytes)
        self._busy_since: float | None = None
        self._looked_at: float | None = None
        self._saved_at: int | None = None  # step of the newest checkpoint that was due

    def handed_over(self, now: float, number: int, step: int, nbytes: int) -> None:
        """Hand-over `number` of `nbytes` of state, copied at `step`, waits for the store from now on."""
        if self._busy_since is None:
            self._busy_since = now
        self._waiting[number] = step, nbytes

    def due(self, now: float, step: int, waiting: Collection[int]) -> bool:
        """To be called after every iteration: whether a checkpoint is due.

        step: iterations finished. waiting: numbers of the hand-overs that are not durable.
        """
        if self._fixed:
            return step % self.interval == 0
        paused = self._time_step(now)
        self._measure(now, waiting, paused)
        self._looked_at = now
        self._adjust()
        if self._saved_at is None or step < self._saved_at:
            self._saved_at = step  # the run begins, or has gone back
        if step - self._saved_at < self.interval:
            return False
        self._saved_at = step
        return True

    def lag(self, step: int, waiting: Collection[int]) -> int:
        """Iterations between `step` and the oldest hand-over that is not durable, 0 when all are."""
        left = self._waiting.keys() & set(waiting)
        return max((step - self._waiting[number][0] for number in left), default=0)

    def _time_step(self, now: float) -> bool:
        """Take the time of an iteration; returns whether the loop did something else meanwhile."""
        if self._looked_at is None:
            return False
        seconds = now - self._looked_at
        if self.step_seconds is None:
            self.step_seconds = seconds
            return False
        most = _OUTLIER * self.step_seconds
        self.step_seconds += _NEW * (min(seconds, most) - self.step_seconds)
        return seconds > most

    def _measure(self, now: float, waiting: Collection[int], paused: bool) -> None:
        if self._busy_since is None:
            return
        durable = self._forget(waiting)
        if paused:  # nobody looked: what is done may have been done at any time since
            self._busy_since = now if self._waiting else None
        elif durable:
            since = max(self._busy_since, self._looked_at if self._looked_at is not None else now)
            done_at = (since + now) / 2
            if done_at > self._busy_since:
                self._take(durable / (done_at - self._busy_since))
            self._busy_since = done_at if self._waiting else None
        elif self.bandwidth is not None and now > self._busy_since:
            # Not done yet, so not faster than this: a store that hangs never tells of an end.
            _, nbytes = self._waiting[min(self._waiting)]
            self.bandwidth = min(self.bandwidth, nbytes / (now - self._busy_since))

    def _take(self, bandwidth: float) -> None:
        if self.bandwidth is None:
            self.bandwidth = bandwidth
        else:
            self.bandwidth += _NEW * (bandwidth - self.bandwidth)

    def _forget(self, waiting: Collection[int]) -> int:
        """Take in what became durable; returns its bytes."""
        return sum(self._waiting.pop(number)[1] for number in self._waiting.keys() - set(waiting))

    def _adjust(self) -> None:
        """The interval that the measurements ask for. Longer at once, shorter only with some room."""
        if not self.step_seconds:
            return
        pace = min(SHARE * self.bandwidth if self.bandwidth is not None else math.inf, self._budget)
        if math.isinf(pace):
            return
        least = self._bytes / pace / self.step_seconds if pace > 0 else math.inf
        shorter = _whole(least * HYSTERESIS)
        if least > self.interval:
            self.interval = _whole(least)
        elif shorter < self.interval:
            self.interval = shorter


def _whole(interval: float) -> int:
    return max(1, math.ceil(min(interval, LONGEST_INTERVAL)))
