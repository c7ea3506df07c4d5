"""Decide when the next partial checkpoint is due and how large it may be, from events and times that callers pass in.

If the interval is a number, a checkpoint is due every so many iterations and may use its whole budget. If it is "auto",
it is the shortest one that both the store and a budget of training time allow (`policy/overhead`). The store allows
`SHARE` of its measured bandwidth, and `max_bandwidth`. If it requires a long interval, checkpoints become smaller and
more frequent. At the same bandwidth, saving an eighth of the state eight times as often loses less than saving all of
it rarely (Qiao et al., ICML 2019). All times are seconds on one monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from scarctl.policy.overhead import LONGEST_SECONDS, Overhead

FIRST_INTERVAL = 10
"""Interval in iterations, until the first measurement."""
LONGEST_INTERVAL = 10_000
"""Longest interval, in iterations, that the store's pace causes."""
LONGEST_SHARED = 60.0
"""Longest interval, in seconds, that a budget causes among ranks, because they exchange requests at checkpoints."""
LONG_INTERVAL = 40
"""Interval in iterations above which checkpoints become smaller."""
LEAST_SHARE = 1 / 8
"""Size of the smallest checkpoint, as a share of the largest."""
SHARE = 0.8
"""Usable share of the measured bandwidth. The rest is a reserve for neighbours, the file system and sealed states."""
HYSTERESIS = 1.25
"""Checkpoints become more frequent only if the pace leaves this factor of room."""
LARGER_HYSTERESIS = 1.5
"""Checkpoints become larger only if the pace leaves this factor of room: waiting loses nothing."""

_NEW = 0.3  # weight of a new measurement
_OUTLIER = 4.0  # most that one step, perhaps an evaluation, counts for, in usual steps
_ENOUGH = 5  # measurements of checkpoints of one size before it is judged
_PATIENCE = 20  # measurements before checkpoints become larger
_LATER = 100  # measurements before a halving that did not help is tried again
_HELPS = 0.75  # a halving helps if a checkpoint then takes at most this share of the time


class Cadence:
    """Decides after every iteration whether to save, and how much.

    The store's bandwidth is measured from acknowledgements: bytes that became durable over the time since the store
    started on them. They are polled once per iteration, so each counts as finished in the middle of its iteration.
    """

    def __init__(
        self,
        interval: int | None,
        *,
        checkpoint_bytes: int,
        max_bandwidth: float | None = None,
        overhead: float = math.inf,
        divisible: bool = True,
        shared: bool = False,
    ) -> None:
        """interval: iterations, None for "auto". checkpoint_bytes: bytes of the largest checkpoint.

        max_bandwidth: bytes per second that saving may use on average. overhead: share of training time that
        checkpoints may take. divisible: whether checkpoints may be smaller. shared: other ranks use the same interval,
        so only `agree` changes it.
        """
        self.interval = interval if interval is not None else FIRST_INTERVAL
        """Current number of iterations between two checkpoints."""
        self.proposed = self.interval
        """Interval that the measurements require, in iterations; equals `interval` unless that is shared."""
        self.share = 1.0
        """Current size of a checkpoint as a share of the largest: 1, 1/2, 1/4 or 1/8."""
        self.bandwidth: float | None = None
        """Bytes per second that the store accepts; None before the first measurement."""
        self.step_seconds: float | None = None
        """Seconds per iteration; None before the first iteration has ended."""
        self.overhead = Overhead(overhead, LONGEST_SHARED if shared else LONGEST_SECONDS)
        """The cost of checkpoints, also measured for a fixed interval."""
        self._fixed = interval is not None
        self._paced = self.interval
        """Shortest interval that the store allows."""
        self._copying = False
        """Whether a regular checkpoint was due after the newest iteration, so that it is copied alongside the next."""
        self._foreign: set[int] = set()
        """Numbers of the waiting hand-overs that do not come from regular checkpoints."""
        self._divisible = divisible
        self.shared = shared
        self._bytes = checkpoint_bytes
        self._budget = math.inf if max_bandwidth is None else max_bandwidth
        self._limited = max_bandwidth is not None
        self._waiting: dict[int, int] = {}  # number -> bytes
        self._busy_since: float | None = None
        self._looked_at: float | None = None
        self._saved_at: int | None = None  # step of the newest checkpoint that was due
        self._measured = 0  # measurements at the current share
        self._long = 0  # the latest consecutive ones of these that require a long interval
        # Seconds per checkpoint and bandwidth at the previous share, for comparison.
        self._before: tuple[float, float] | None = None
        self._halving_helps = True

    @property
    def waiting(self) -> Collection[int]:
        """Numbers of the hand-overs that were not durable at the last poll."""
        return self._waiting

    @property
    def fixed(self) -> bool:
        """Whether the interval is a setting."""
        return self._fixed

    def left(self, step: int) -> int:
        """Return the iterations from `step` to the next regular checkpoint."""
        if self._fixed:
            return self.interval - step % self.interval
        return self.interval - (step - (self._saved_at if self._saved_at is not None else step))

    def handed_over(self, now: float, number: int, nbytes: int, *, regular: bool = True) -> None:
        """Note that hand-over `number`, of `nbytes` bytes of state, waits for the store since `now`.

        regular: it comes from a regular checkpoint.
        """
        if not regular:
            self._foreign.add(number)
        if self._busy_since is None:
            self._busy_since = now
        self._waiting[number] = nbytes

    def superseded(self, numbers: Iterable[int]) -> None:
        """Note that these hand-overs never become durable, because a later one replaces them."""
        for number in numbers:
            self._waiting.pop(number, None)

    def due(
        self, now: float, step: int, waiting: Collection[int], *, stalled: float = 0.0, busy: bool = False
    ) -> bool:
        """Return whether a checkpoint is due. Call this after every iteration.

        step: iterations finished. waiting: numbers of the hand-overs that are not durable. stalled: seconds of the
        iteration in hooks and waiting. busy: other work of checkpoints was done alongside the iteration.
        """
        self._account(now, stalled, busy)
        if self._fixed:
            if self._waiting:
                self._forget(waiting)
            self._looked_at = now
            return self._begin(step % self.interval == 0)
        paused, saving = self._time_step(now), self._busy_since is not None
        if saving:
            self._measure(now, waiting, paused)
        self._looked_at = now
        if self._saved_at is None or step < self._saved_at:
            self._saved_at = step  # the run has just started or rolled back
        # Not after every iteration: this takes longer than the rest.
        if saving or self._limited or step - self._saved_at >= self.interval:
            self._adjust()
        self._propose()
        if step - self._saved_at < self.interval:
            return self._begin(False)
        self._saved_at = step
        if self.bandwidth is None and self._waiting:
            self._paced = _whole(2 * self._paced)  # the store is slow, and not measured yet
        return self._begin(True)

    def _account(self, now: float, stalled: float, busy: bool) -> None:
        """Add the iteration that ends `now` to the account of checkpoints' costs."""
        if self._looked_at is None:
            return
        if self._foreign:
            self.overhead.skip()
            self._foreign &= self._waiting.keys()
        else:
            self.overhead.step(
                now - self._looked_at, stalled, busy=busy or self._copying or bool(self._waiting)
            )

    def _begin(self, due: bool) -> bool:
        """Note whether a checkpoint begins, and return it."""
        self._copying = due
        if due:
            self.overhead.begin()
            if not self._fixed:
                self._propose()
        return due

    def agree(self, interval: int) -> None:
        """Adopt the interval, in iterations, that all ranks agreed on; 0 keeps the current one."""
        if interval and not self._fixed:
            self.interval = interval

    def _propose(self) -> None:
        paced, bounded = self._paced, self.overhead.interval
        self.proposed = paced if paced > bounded else bounded
        if not self.shared:
            self.interval = self.proposed

    def _time_step(self, now: float) -> bool:
        """Measure the iteration that ends `now`; return whether the loop paused within it."""
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
        if paused:  # hand-overs may have become durable at any time during the pause
            self._busy_since = now if self._waiting else None
        elif durable:
            since = max(self._busy_since, self._looked_at if self._looked_at is not None else now)
            done_at = (since + now) / 2
            if done_at > self._busy_since:
                self._take(durable / (done_at - self._busy_since))
            self._busy_since = done_at if self._waiting else None
        elif not self._waiting:
            self._busy_since = None  # the hand-over had no bytes
        elif self.bandwidth is not None and now > self._busy_since:
            # An unfinished hand-over bounds the bandwidth from above: a store that hangs never acknowledges.
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
        """Remove the hand-overs that became durable; return their bytes."""
        return sum(self._waiting.pop(number) for number in self._waiting.keys() - set(waiting))

    def _adjust(self) -> None:
        """Set the share and interval that the measurements require: longer at once, shorter only with some room."""
        if not self.step_seconds or (self.bandwidth is None and math.isinf(self._budget)):
            return
        before = self.share
        if self._divisible:
            self._resize()
        least = self._least()
        shorter = _whole(least * HYSTERESIS)
        if least > self._paced or self.share != before:
            self._paced = _whole(least)
        elif shorter < self._paced:
            self._paced = shorter

    def _resize(self) -> None:
        """Halve or double the share if necessary.

        Half the bytes must save time, but a store may need a fixed time per checkpoint. So halving is a trial. If it
        fails, going back checks it again, because the store may have changed meanwhile.
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
            if self._seconds(self._budget) >= seconds / SHARE:  # the budget counts bytes only
                self._change(self.share / 2)
            elif self._long >= (_ENOUGH if self._halving_helps else _LATER):
                self._halving_helps = True
                self._change(self.share / 2, seconds)

    def _change(self, share: float, seconds: float | None = None) -> None:
        """Change the share; `seconds`: time of a checkpoint at the old share, for comparison."""
        self._before = (seconds, self.bandwidth or 0.0) if seconds else None
        self.share = share
        self._measured = self._long = 0

    def _least(self) -> float:
        """Return the iterations that saving a checkpoint of the current share takes at the permitted pace."""
        seconds = max(self._seconds(self.bandwidth) / SHARE, self._seconds(self._budget))
        return seconds / self.step_seconds if self.step_seconds else 0.0

    def _seconds(self, bandwidth: float | None) -> float:
        """Return the seconds that a checkpoint of the current share takes; 0 without a limit."""
        if bandwidth is None:
            return 0.0
        return self.share * self._bytes / bandwidth if bandwidth > 0 else math.inf


def _whole(interval: float) -> int:
    return max(1, math.ceil(min(interval, LONGEST_INTERVAL)))
