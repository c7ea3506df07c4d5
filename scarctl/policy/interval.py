"""Decide when the next memory checkpoint is due, from what the earlier ones have cost.

A memory checkpoint costs the time that training waits for it, and the processor time of the thread that copies: where
no core is idle, training loses that much. Both are measured exactly, whatever else the machine does. Iterations are
never compared with each other: on a busy machine they differ by more than a checkpoint costs.

Checkpoints are as frequent as the budget, a share of training's time, allows, and at least every `max_loss` seconds.
For the latter they may take twice the budget, and not more. All times are seconds on one monotonic clock, and callers
pass them in.
"""

from __future__ import annotations

import math
from collections import deque

LEAST_SECONDS = 0.1
"""Least time between two checkpoints that their cost sets: more of them would save next to nothing."""
MOST_TIMES = 2.0
"""Times the budget that checkpoints may take, to be at most `max_loss` apart."""

FIRST_SECONDS = 1.0
"""Most time between the first checkpoints, as far as `EARLY_TIMES` allows."""
EARLY_TIMES = 5.0
"""Times the budget that the first checkpoints may take. A few costs have to be known before one can be relied on: the
first is that of new memory, and a busy moment multiplies any."""
_FEW = 4
"""Number of costs that can be relied on."""
_COSTS = 9
"""Newest checkpoints whose costs are compared."""
_NEW = 0.3  # weight of a new measurement
_STAY = 2.0  # times the copy that iterations take when it is made aside again
_OUTLIER = 4.0  # most that one iteration, perhaps an evaluation, counts for, in usual ones


class Cadence:
    """Decides after every iteration whether memory is brought up to date. Not thread-safe."""

    def __init__(
        self, interval: int | None, *, overhead: float, max_loss: float, shared: bool = False
    ) -> None:
        """interval: the store's, in iterations, if it is a setting: memory is then up to date whenever that is due.

        overhead: share of training time that checkpoints may take. max_loss: longest time between two checkpoints,
        in seconds, as far as twice that share allows. shared: other ranks use the same interval, in iterations, so
        only `agree` changes it.
        """
        self.interval = interval or 1
        """Iterations between two checkpoints, as last known."""
        self.proposed = self.interval
        """Interval in iterations that this process's costs require; equals `interval` unless that is shared."""
        self.step_seconds: float | None = None
        """Seconds per iteration; None before the first iteration has ended."""
        self.spent_seconds = 0.0
        """Total cost of all checkpoints so far, in seconds of training."""
        self.shared = shared
        self._fixed = interval
        self._overhead = overhead
        self._max_loss = max_loss
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._copying: float | None = None
        """Usual processor seconds of a copy."""
        self._here = False
        self._looked_step = 0
        self.crossed = False
        """Whether a multiple of the fixed interval was reached at the last call of `due`."""
        self._seconds: float | None = None
        """`seconds`, as of the newest cost."""
        self._looked_at: float | None = None
        self._begun_at: float | None = None
        self._saved_at: int | None = None

    @property
    def fixed(self) -> int | None:
        """The store's interval in iterations if it is a setting; None if not."""
        return self._fixed

    @property
    def cost(self) -> float | None:
        """Usual cost of a checkpoint, in seconds of training; None before the first.

        That is the lower quartile of the newest: one that met something unusual must not leave a run without a copy.
        """
        return sorted(self._costs)[len(self._costs) // 4] if self._costs else None

    @property
    def share(self) -> float | None:
        """Share of training's time that checkpoints take at the present pace; None before the first."""
        cost, seconds = self.cost, self.seconds
        return None if cost is None or seconds is None else cost / max(seconds, 1e-9)

    @property
    def seconds(self) -> float | None:
        """Seconds between two checkpoints that their cost allows; None before the first."""
        cost = self.cost
        if cost is None:
            return None
        wanted = cost / self._overhead
        bounded = max(self._max_loss, wanted / MOST_TIMES)
        if len(self._costs) < _FEW:
            bounded = min(bounded, max(FIRST_SECONDS, wanted / EARLY_TIMES))
        return max(LEAST_SECONDS, min(wanted, bounded))

    @property
    def too_costly(self) -> bool:
        """Whether checkpoints are more than `max_loss` apart, because they would exceed twice the budget."""
        seconds = self.seconds
        return seconds is not None and seconds > max(self._max_loss, LEAST_SECONDS)

    def here(self) -> bool:
        """Return whether the next copy costs less in the training thread than in a thread of its own.

        It does where iterations are shorter than the copy. Training would wait for most of it, and two threads that
        need the interpreter's lock in turn take longer than one.
        """
        step, copying = self.step_seconds, self._copying
        self._here = (
            step is not None and copying is not None and step < (_STAY if self._here else 1.0) * copying
        )
        return self._here

    def spent(self, stalled: float, copying: float, *, aside: bool = True) -> None:
        """Note the cost of a checkpoint: seconds in which training waited, and processor seconds of copying.

        aside: in a thread of its own. Otherwise training has waited for all of the copy.
        """
        self._copying = copying if self._copying is None else self._copying + _NEW * (copying - self._copying)
        cost = max(0.0, stalled) + (copying if aside else 0.0)
        self._costs.append(cost)
        self.spent_seconds += cost
        self._seconds = self.seconds

    def due(self, now: float, step: int) -> bool:
        """Return whether a checkpoint is due. Call it once after every iteration. step: iterations finished."""
        self._time_step(now)
        seconds = self._seconds
        if seconds is not None:
            self._propose(seconds)
        fixed, before = self._fixed, self._looked_step
        self._looked_step = step
        # A loop may take several steps before it declares that they have ended.
        self.crossed = fixed is not None and (step % fixed == 0 or step // fixed > before // fixed)
        if self._saved_at is None or self._begun_at is None or step < self._saved_at:
            # The run has just started, with a whole checkpoint, or it was rolled back.
            self._saved_at, self._begun_at = step, now
            return fixed is not None and step % fixed == 0
        due = self.crossed
        if self.shared or seconds is None:
            due = due or step - self._saved_at >= self.interval
        else:
            # Half of an iteration early is nearer to the wanted time than half of one late.
            due = due or now - self._begun_at + 0.5 * (self.step_seconds or 0.0) >= seconds
        if due:
            self._saved_at, self._begun_at = step, now
        return due

    def agree(self, interval: int) -> None:
        """Adopt the interval, in iterations, that all ranks agreed on; 0 keeps the current one."""
        if interval and self.shared:
            self.interval = interval

    def _time_step(self, now: float) -> None:
        before, self._looked_at = self._looked_at, now
        if before is None:
            return
        seconds = now - before
        if self.step_seconds is None:
            self.step_seconds = seconds
        else:
            self.step_seconds += _NEW * (min(seconds, _OUTLIER * self.step_seconds) - self.step_seconds)

    def _propose(self, seconds: float) -> None:
        step = self.step_seconds
        if not step:
            return
        self.proposed = max(1, math.ceil(min(seconds / step, 1e9) - 0.5))
        if not self.shared:
            self.interval = min(self.proposed, self._fixed or self.proposed)
