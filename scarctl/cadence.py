"""When the next partial checkpoint is due, and how large it may be: pure, fed with what happens and when.

With a number as interval a checkpoint is due every so many iterations, and may take the whole of its budget. With
"auto" the store sets the pace: the interval is the shortest at which saving takes at most `SHARE` of what the store was
measured to take, and of the byte budget if there is one. Where that is a long interval, checkpoints become smaller and
come more often: of the same bytes per time, an eighth of the state eight times as often loses less than all of it now
and then (Qiao et al.). All times are seconds on one monotonic clock, and come in with the calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection

FIRST_INTERVAL = 10
"""Used until something was measured."""
LONGEST_INTERVAL = 10_000
LONG_INTERVAL = 40
"""Where the pace asks for a longer one, checkpoints become smaller."""
LEAST_SHARE = 1 / 8
"""Of the largest checkpoint; there is no smaller one."""
SHARE = 0.8
"""Of the measured bandwidth. The rest is for what cannot be planned: neighbours, the file system, a sealed state."""
HYSTERESIS = 1.25
"""Checkpoints come more often only when that would have this much room."""
LARGER_HYSTERESIS = 1.5
"""They become larger only when that would: nothing is lost by waiting."""

_NEW = 0.3  # weight of a new measurement
_OUTLIER = 4.0  # a step longer than so many usual ones (an evaluation) counts as so many
_ENOUGH = 5  # measurements of checkpoints of one size, to judge it
_PATIENCE = 20  # so many before they become larger
_LATER = 100  # so many before halving, which did not help, is tried again
_HELPS = 0.75  # of the time of a checkpoint twice as large: one that takes longer is not worth it


class Cadence:
    """Decides after every iteration whether to save, and how much.

    How fast the store is comes from acknowledgements: the bytes of what became durable, over the time since the store
    began with it. They are looked for once per iteration, so what is found counts as done in its middle.
    """

    def __init__(
        self,
        interval: int | None,
        *,
        checkpoint_bytes: int,
        max_bandwidth: float | None = None,
        divisible: bool = True,
        shared: bool = False,
    ) -> None:
        """interval: iterations, None for "auto". checkpoint_bytes: of the largest checkpoint.

        max_bandwidth: bytes per second that saving may use on average. divisible: there may be smaller checkpoints.
        shared: others keep the same interval, and it changes by `agree` alone.
        """
        self.interval = interval if interval is not None else FIRST_INTERVAL
        """Iterations between two checkpoints, as it is now."""
        self.proposed = self.interval
        """What the measurements ask for: the interval, unless that is shared."""
        self.share = 1.0
        """Of the bytes of the largest checkpoint, what one may take now: 1, 1/2, 1/4 or 1/8."""
        self.bandwidth: float | None = None
        """Bytes per second that the store takes; None before the first measurement."""
        self.step_seconds: float | None = None
        """Time of an iteration, None before the first."""
        self._fixed = interval is not None
        self._divisible = divisible
        self.shared = shared
        self._bytes = checkpoint_bytes
        self._budget = math.inf if max_bandwidth is None else max_bandwidth
        self._waiting: dict[int, int] = {}  # number -> bytes
        self._busy_since: float | None = None
        self._looked_at: float | None = None
        self._saved_at: int | None = None  # step of the newest checkpoint that was due
        self._measured = 0  # measurements at the present share
        self._long = 0  # of these, the last ones that ask for a long interval
        # Seconds that a checkpoint took at the share before, to be compared, and the bandwidth then.
        self._before: tuple[float, float] | None = None
        self._halving_helps = True

    @property
    def waiting(self) -> Collection[int]:
        """Numbers of the hand-overs that were not durable when somebody looked last."""
        return self._waiting.keys()

    def handed_over(self, now: float, number: int, nbytes: int) -> None:
        """Hand-over `number` of `nbytes` of state waits for the store from now on."""
        if self._fixed:
            return  # nobody would ask, or take it away again
        if self._busy_since is None:
            self._busy_since = now
        self._waiting[number] = nbytes

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
        if self.bandwidth is None and self._waiting:
            self._propose(_whole(2 * self.proposed))  # slow, and nobody knows yet how slow
        return True

    def agree(self, interval: int) -> None:
        """All who share the interval keep this one from the checkpoint on that is due now; 0: the one they have."""
        if interval and not self._fixed:
            self.interval = _whole(interval)

    def _propose(self, interval: int) -> None:
        self.proposed = interval
        if not self.shared:
            self.interval = interval

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
        elif not self._waiting:
            self._busy_since = None  # it had no bytes
        elif self.bandwidth is not None and now > self._busy_since:
            # Not done yet, so not faster than this: a store that hangs never tells of an end.
            oldest = self._waiting[min(self._waiting)]
            if oldest:
                self.bandwidth = min(self.bandwidth, oldest / (now - self._busy_since))

    def _take(self, bandwidth: float) -> None:
        if self.bandwidth is None:
            self.bandwidth = bandwidth
        else:
            self.bandwidth += _NEW * (bandwidth - self.bandwidth)
        self._measured += 1
        self._long = self._long + 1 if self._least() > LONG_INTERVAL else 0

    def _forget(self, waiting: Collection[int]) -> int:
        """Take in what became durable; returns its bytes."""
        return sum(self._waiting.pop(number) for number in self._waiting.keys() - set(waiting))

    def _adjust(self) -> None:
        """Share and interval that the measurements ask for. Longer at once, shorter only with some room."""
        if not self.step_seconds or (self.bandwidth is None and math.isinf(self._budget)):
            return
        before = self.share
        if self._divisible:
            self._resize()
        least = self._least()
        shorter = _whole(least * HYSTERESIS)
        if least > self.proposed or self.share != before:
            self._propose(_whole(least))
        elif shorter < self.proposed:
            self._propose(shorter)

    def _resize(self) -> None:
        """Halve or double the share, if need be.

        Half the bytes have to save time: a store may want time for each checkpoint, whatever its size. So halving is
        a trial, and because the store may have changed meanwhile, one that fails is checked by going back.
        """
        seconds = self._seconds(self.bandwidth)
        least = self._least()
        if self._before is not None and self._measured >= _ENOUGH:
            before, bandwidth = self._before
            self._before = None
            if not self._halving_helps:
                self._halving_helps = before <= _HELPS * seconds
            elif seconds > _HELPS * before:
                self._halving_helps = False
                self._change(2 * self.share, seconds)
                self.bandwidth = bandwidth
                return
        if self.share < 1 and self._measured >= _PATIENCE and 2 * least * LARGER_HYSTERESIS <= LONG_INTERVAL:
            self._change(2 * self.share)
        elif self.share > LEAST_SHARE and least > LONG_INTERVAL:
            if self._seconds(self._budget) >= seconds / SHARE:  # the budget goes by bytes alone
                self._change(self.share / 2)
            elif self._long >= (_ENOUGH if self._halving_helps else _LATER):
                self._halving_helps = True
                self._change(self.share / 2, seconds)

    def _change(self, share: float, seconds: float | None = None) -> None:
        """To another share; `seconds`: of a checkpoint so far, to be compared."""
        self._before = (seconds, self.bandwidth or 0.0) if seconds else None
        self.share = share
        self._measured = self._long = 0

    def _least(self) -> float:
        """Iterations that a checkpoint of the present share takes, at the pace that saving may have."""
        seconds = max(self._seconds(self.bandwidth) / SHARE, self._seconds(self._budget))
        return seconds / self.step_seconds if self.step_seconds else 0.0

    def _seconds(self, bandwidth: float | None) -> float:
        """Time for the bytes of a checkpoint of the present share, 0 where there is no limit."""
        if bandwidth is None:
            return 0.0
        return self.share * self._bytes / bandwidth if bandwidth > 0 else math.inf


def _whole(interval: float) -> int:
    return max(1, math.ceil(min(interval, LONGEST_INTERVAL)))
