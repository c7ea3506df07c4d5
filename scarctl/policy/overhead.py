"""Measure what checkpoints cost a training, and find the shortest interval that a budget for it allows.

A checkpoint costs the time that the training thread spends in hooks and waiting, which is measured exactly. It also
slows down the iterations during which it is copied and saved. That is the difference between those iterations and quiet
ones of the same time, in which nothing of a checkpoint runs. One iteration is noise, so means over many checkpoints
decide. An account of the time spent corrects them: if one checkpoint takes too much, the next eight pay it back.

All times are seconds. Callers pass them in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

LONGEST_SECONDS = 300.0
"""Longest time between two checkpoints that the budget may cause. A budget that needs more is exceeded."""
LEAST_SHARE = 1 / 4
"""Share of the budget that checkpoints may use even if every iteration's hooks use all of it."""

_QUIET = 64
"""Quiet iterations that are kept for comparison: the newest."""
_ENOUGH = 5
"""Quiet iterations without which no iteration is compared."""
_CHECKPOINTS = 16
"""Number of newest checkpoints whose costs are averaged."""
_PAID_BACK = 8
"""Checkpoints over which a deviation from the budget is made up for."""
_OUTLIER, _OUTLIER_SECONDS = 4.0, 0.05
"""Most that one iteration counts for, in usual ones, and most beyond a usual one: it may contain an evaluation."""
_STALE = 256
"""Iterations without a quiet one, after which an interval is lengthened to get some."""
_PROBE, _MOST_PROBE = 8, 64
"""Iterations of such an interval; doubled if it did not suffice."""
_SURE = 8
"""Checkpoints after which their mean cost is known. Until then no interval is longer than all iterations so far ..."""
_YOUNG = 8
"""... unless that takes more than so many times the budget."""


class Cost(NamedTuple):
    """Mean seconds that one checkpoint takes from training."""

    stalled: float
    """Seconds of the training thread in hooks and waiting."""
    slowed: float
    """Seconds by which iterations alongside its copying and saving took longer; negative if noise dominates."""

    @property
    def seconds(self) -> float:
        """Return their sum. Noise in `slowed`, an estimate, never offsets `stalled`, which is exact."""
        return max(0.0, self.stalled) + max(0.0, self.slowed)


@dataclass(frozen=True, slots=True)
class _Usual:
    """Duration of a usual iteration."""

    own: float
    """Seconds without hooks."""
    hooks: float
    most: float
    """Seconds at which longer iterations are clipped."""

    @property
    def seconds(self) -> float:
        return self.own + self.hooks


class Overhead:
    """The account of one training. Not thread-safe."""

    def __init__(self, budget: float, longest: float = LONGEST_SECONDS) -> None:
        """budget: share of training time that checkpoints may take, above 0.

        longest: most seconds between two checkpoints that the budget may cause.
        """
        self.budget = budget
        self._longest = longest
        self.interval = 1 if math.isinf(budget) else _PROBE
        """Shortest interval that the budget allows, in iterations."""
        self.slowed_seconds = 0.0
        """Estimated total seconds by which iterations alongside checkpoints took longer."""
        self.probing = not math.isinf(budget)
        """Whether undisturbed iterations are missing: the interval is longer than the budget requires, to get some."""
        self.bounded = False
        """Whether the longest time sets the interval, and the budget is exceeded."""
        self._quiet: deque[tuple[float, float]] = deque(maxlen=_QUIET)
        self._any: deque[tuple[float, float]] = deque(maxlen=_QUIET)
        self._enough = False
        """Whether there are enough of them."""
        self._known_usual: _Usual | None = None
        """The usual iteration, until another one is noted."""
        self._without_quiet = 0
        self._probe = _PROBE
        self._open = False
        """Whether a regular checkpoint was begun, which the next fields describe."""
        self._beside: list[tuple[float, float]] = []
        self._iterations = 0
        self._all_iterations = 0
        """All iterations that were noted."""
        self._over = True
        """Whether a quiet iteration has followed those alongside the newest checkpoint."""
        self._void = False
        """Whether other work ran alongside the newest checkpoint, so that its cost is unknown."""
        self._costs: deque[Cost] = deque(maxlen=_CHECKPOINTS)
        self._debt = 0.0
        """Seconds by which checkpoints have exceeded the budget; negative: seconds of the budget not used."""
        self._spent = self._trained = 0.0
        """Seconds that the newest checkpoints took, and seconds of training in that time; older ones count less."""

    @property
    def cost(self) -> Cost | None:
        """Mean cost of the newest checkpoints; None before the first is over."""
        costs = [*self._costs]
        if self._known and self._beside:
            costs.append(self._cost(self._usual()))
        return _mean(costs) if costs else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a usual iteration, hooks included; None before the first."""
        return self._usual().seconds if self._any else None

    @property
    def hook_seconds(self) -> float:
        """Seconds that hooks take in an iteration in which nothing is due."""
        return self._usual().hooks if self._quiet else 0.0

    @property
    def share(self) -> float | None:
        """Measured overhead of the newest checkpoints and all hooks, as a share; None before a checkpoint is over."""
        usual = self._usual() if self._any else None
        if usual is None or not self._trained or not usual.own:
            return None
        return max(0.0, self._spent / self._trained + usual.hooks / usual.own)

    def step(self, seconds: float, stalled: float, *, busy: bool) -> None:
        """Note an iteration. stalled: seconds of it in hooks and waiting. busy: a checkpoint was copied or saved."""
        one = seconds - stalled if seconds > stalled else 0.0, stalled
        self._iterations += 1
        self._all_iterations += 1
        self._known_usual = None
        if not self._enough:
            self._any.append(one)
        if busy:
            self._without_quiet += 1
            self._beside.append(one)
            self._over = False
            return
        self._quiet.append(one)
        self._without_quiet, self._probe = 0, _PROBE
        first = not self._enough and len(self._quiet) == _ENOUGH
        if first or not self._over:
            self._enough = self._enough or first
            self._over = True
            self._choose()

    def skip(self) -> None:
        """Note an iteration that measures nothing, because other work than a regular checkpoint ran."""
        self._iterations += 1
        self._all_iterations += 1
        self._void = self._void or not self._over

    def begin(self) -> None:
        """Note that a regular checkpoint begins, and settle the account of the previous one."""
        if self._open and self._any and not self._void:
            usual = self._usual()
            cost = self._cost(usual)
            self._costs.append(cost)
            # One checkpoint's slowdown is mostly noise, so the account gets its exact part and the mean slowdown.
            taken = max(0.0, cost.stalled) + max(0.0, _mean(self._costs).slowed)
            trained = self._iterations * usual.own
            self.slowed_seconds += cost.slowed
            if not math.isinf(self.budget):
                most = _mean(self._costs).seconds
                debt = self._debt + taken - self._allowed(usual) * trained
                # Unused budget cannot be used later. An excess that the longest interval causes is not paid back.
                self._debt = max(-most, min(debt, most) if self.bounded else debt)
            kept = 1 - 1 / _CHECKPOINTS
            self._spent, self._trained = kept * self._spent + taken, kept * self._trained + trained
        self._open = True
        self._beside, self._iterations, self._over, self._void = [], 0, False, False
        self._choose()

    def _choose(self) -> None:
        """Set the interval."""
        if not self._any or math.isinf(self.budget):
            return
        usual, debt = self._usual(), self._debt
        allowed = self._allowed(usual) * usual.own
        costs = [*self._costs]
        if self._known:
            costs.append(self._cost(usual))
        found = 1.0 if costs else _PROBE
        if costs and allowed:
            expected = _mean(costs).seconds
            if len(costs) > len(self._costs):
                debt += max(0.0, costs[-1].stalled) + max(0.0, _mean(costs).slowed) - expected
            found = (expected + debt / _PAID_BACK) / allowed
        longest = max(1.0, self._longest / usual.seconds) if usual.seconds else math.inf
        self.bounded = found > longest
        if len(self._costs) < _SURE:
            # A few noisy iterations must not leave a young run without a copy. The account has what this costs.
            found = max(found / _YOUNG, min(found, self._all_iterations))
        self.interval = max(1, math.ceil(min(found, longest, 1e9)))
        stale = self._without_quiet > max(_STALE, _CHECKPOINTS * self.interval)
        self.probing = not self._enough or stale
        if self.probing and not self._over:
            self.interval = max(self.interval, self._probe)
            self._probe = min(2 * self._probe, _MOST_PROBE)
        elif self.probing:  # the store has caught up, which is rare: stay undisturbed until there are enough
            self.interval = max(self.interval, self._iterations + _ENOUGH - len(self._quiet))

    @property
    def _known(self) -> bool:
        """Whether the newest checkpoint is over, and its cost is known."""
        return self._open and self._over and not self._void

    def _allowed(self, usual: _Usual) -> float:
        """Return the share of training time that checkpoints may take in addition to every iteration's hooks."""
        hooks = usual.hooks / usual.own if usual.own else 0.0
        return max(self.budget - hooks, LEAST_SHARE * self.budget)

    def _usual(self) -> _Usual:
        if self._known_usual is None:
            known = self._quiet if self._enough else self._any
            middle = median([own for own, _ in known])
            most = max(_OUTLIER * middle, middle + _OUTLIER_SECONDS)
            hooks = median([stalled for _, stalled in known])
            self._known_usual = _Usual(fmean([min(own, most) for own, _ in known]), hooks, most)
        return self._known_usual

    def _cost(self, usual: _Usual) -> Cost:
        """Return the cost of the newest checkpoint so far."""
        stalled = sum(stall for _, stall in self._beside) - len(self._beside) * usual.hooks
        if not self._enough:
            return Cost(stalled, 0.0)
        return Cost(stalled, sum(min(own, usual.most) - usual.own for own, _ in self._beside))


def _mean(costs: Collection[Cost]) -> Cost:
    """Return the mean cost. A single very expensive checkpoint counts less, because the account has its full cost."""
    return Cost(
        _without_outliers(one.stalled for one in costs), _without_outliers(one.slowed for one in costs)
    )


def _without_outliers(values: Iterable[float]) -> float:
    found = list(values)
    most = _OUTLIER * median(map(abs, found))
    return fmean(max(-most, min(value, most)) for value in found)
