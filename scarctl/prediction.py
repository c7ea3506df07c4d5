"""What a recovery would cost: predicted rework, and which way back to take. Pure.

The rework of a partial recovery is told by Theorem 3.2 of the SCAR paper, with what a run's own history says of its
convergence (`scarctl.history`). Its bound is the worst case, a perturbation straight away from the optimum: the upper
end of the interval. What is expected is that the lost part goes back on the way that it came.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scarctl.convergence import CannotTell, Convergence
from scarctl.errors import ScarError
from scarctl.history import History
from scarctl.theory import rework_at_angle, rework_bound_now, rework_bound_of_ages

Mode: TypeAlias = Literal["partial", "rollback", "auto"]
MODES: tuple[Mode, ...] = ("partial", "rollback", "auto")


@dataclass(frozen=True, slots=True)
class Rework:
    """Iterations that a recovery costs."""

    iterations: float | None
    """As expected. None: it cannot be told."""
    low: float | None = None
    """The least of what is expected over the history's 95 % interval."""
    high: float | None = None
    """The largest bound over it."""
    basis: str | None = None
    """"distances": from how far values are from their copies; "ages": from how old the copies are, as if every part
    went straight; "steps": the iterations that are done again, exactly."""
    reason: str | None = None
    """Why it cannot be told."""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "iterations": self.iterations,
            "low": self.low,
            "high": self.high,
            "basis": self.basis,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        if self.iterations is None or self.low is None or self.high is None:
            return "cannot tell"
        if self.low == self.high:
            return f"{self.iterations:.10g}"
        return f"{self.iterations:.3g} ({self.low:.3g} to {self.high:.3g})"


def repeated(steps: int) -> Rework:
    """Of a rollback: what came after the state that it goes back to."""
    return Rework(float(steps), float(steps), float(steps), "steps")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a run's convergence at an iteration."""

    step: int
    convergence: Convergence | CannotTell
    """`x0_distance` is ‖x(step) - x*‖."""

    @staticmethod
    def of(step: int, parts: Sequence[History]) -> Outlook:
        """What the histories of all parts of a state say together."""
        if not parts or not all(part.points for part in parts):
            return Outlook(step, CannotTell("no session has saved how far the run moves"))
        return Outlook(step, History.joined(parts).convergence(step))

    def to_json(self) -> dict[str, Any]:
        """Numbers are None where they cannot be told; then `reason` says why."""
        fit = self.convergence
        if isinstance(fit, CannotTell):
            names = ("c", "c_interval", "distance", "distance_interval", "points")
            return {**dict.fromkeys(names), "reason": fit.reason}
        return {
            "c": fit.c,
            "c_interval": list(fit.c_interval),
            "distance": fit.x0_distance,
            "distance_interval": None if fit.x0_interval is None else list(fit.x0_interval),
            "points": fit.points,
            "reason": None,
        }

    def of_perturbation(self, norm: float, share: float, *, since: int = 0) -> Rework:
        """Rework after a perturbation of this norm, of a `share` of the state.

        since: how many iterations ago that was its norm: the lost part has moved on.
        """

        def bound(c: float, distance: float) -> float:
            moved = math.sqrt(share) * distance * math.expm1(-since * math.log(c)) if since else 0.0
            return rework_bound_now(c, distance, norm + moved)

        return self._over_the_interval(bound, share, "distances")

    def of_ages(self, ages: ArrayLike, share: float, counts: ArrayLike | None = None) -> Rework:
        """Rework after a `share` of the state went back to copies that are so many iterations old.

        counts: how many copies are of each age; default one.
        """

        @functools.cache  # a rate stands in the profile with two distances, which count for nothing here
        def bound(c: float) -> float:
            return rework_bound_of_ages(c, ages, math.sqrt(share), counts=counts)

        return self._over_the_interval(lambda c, _: bound(c), share, "ages")

    def _over_the_interval(self, bound: Callable[[float, float], float], share: float, basis: str) -> Rework:
        fit = self.convergence
        if isinstance(fit, CannotTell):
            return Rework(None, reason=fit.reason)
        if fit.x0_distance is None or any(near <= 0 for _, near, _ in fit.profile):
            return Rework(None, reason="how far the optimum is cannot be told from the history")
        rates = [(fit.c, fit.x0_distance)]
        rates += [(c, distance) for c, near, far in fit.profile for distance in (near, far)]
        bounds = [bound(c, distance) for c, distance in rates]
        if not math.isfinite(max(bounds)):
            return Rework(None, reason="the perturbation is too large for a bound")
        expected = [
            rework_at_angle(c, most, math.sqrt(share)) for (c, _), most in zip(rates, bounds, strict=True)
        ]
        return Rework(expected[0], min(expected), max(bounds), basis)


def rework_of_loss(
    outlook: Outlook,
    norm: float | None,
    ages: ArrayLike,
    share: float,
    *,
    counts: ArrayLike | None = None,
    since: int = 0,
) -> Rework:
    """Rework after a `share` of the state went back to its copies.

    norm: the perturbation, `since` iterations ago; None where it is not known, then the copies' ages count.
    """
    old = np.asarray(ages, dtype=np.float64)
    if not old.size or (norm is None and not old.any()):
        return Rework(0.0, 0.0, 0.0, "ages")
    if norm == 0.0 and not since:
        return Rework(0.0, 0.0, 0.0, "distances")
    if norm is None:
        return outlook.of_ages(old, share, counts)
    return outlook.of_perturbation(norm, share, since=since)


def grouped(ages: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different ones, ascending, and how often each is there."""
    # Not np.unique: it loads numpy.ma, which a command that is to start fast does without.
    ordered = np.sort(ages)
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)])
    return ordered[first], np.diff(np.append(first, len(ordered)))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a recovery is predicted to cost, for its report."""

    rework: Rework
    """Of the way that is taken."""
    rollback_steps: int | None
    """What going back to the newest state of one step costs; None when there is none."""
    reason: str | None = None
    """Why this way is taken, where it was not asked for."""

    def to_json(self) -> dict[str, Any]:
        """Fields of a report."""
        return {
            "rework": self.rework.to_json(),
            "rollback_steps": self.rollback_steps,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """Which way back is taken."""

    mode: str
    """"partial" or "rollback"."""
    reason: str | None = None
    """None where it was asked for."""

    def cost(self, rework: Rework, rollback_steps: int | None) -> Cost:
        """For the report. rework: of a partial recovery."""
        back = self.mode == "rollback" and rollback_steps is not None
        return Cost(repeated(rollback_steps or 0) if back else rework, rollback_steps, self.reason)


def choose(mode: str, rework: Rework, rollback_steps: int | None, most: float | None = None) -> Choice:
    """The way that costs less, and no more than `most` iterations; partial where that cannot be told.

    mode: "auto", or the way that is asked for. rework: of a partial recovery. rollback_steps: None when there is no
    state to go back to.

    Raises ScarError (kind "too-much-rework") when the way costs more than `most`, or may: where a cost is an interval
    its upper end counts.
    """
    back = None if rollback_steps is None else repeated(rollback_steps)
    choice = Choice(mode) if mode != "auto" else _cheaper(rework, rollback_steps)
    if most is None:
        return choice
    costs = {"partial": rework.high, "rollback": None if back is None else back.high}
    if mode == "auto" and not _within(costs[choice.mode], most):
        other = "rollback" if choice.mode == "partial" else "partial"
        if _within(costs[other], most):
            choice = Choice(
                other, f"it costs no more than {most:g} iterations; of {choice.mode}, that is not certain"
            )
    if _within(costs[choice.mode], most):
        return choice
    cost = costs[choice.mode]
    what = "a partial recovery" if choice.mode == "partial" else "a rollback"
    why = (
        f"may cost {cost:.3g} iterations"
        if cost is not None
        else f"costs a number of iterations that cannot be told: {rework.reason or 'nothing to go back to'}"
    )
    raise ScarError(
        f"{what} {why}; at most {most:g} are allowed",
        hint="nothing was changed; allow more (--max-rework), or another way (--mode auto)",
        kind="too-much-rework",
    )


def _within(cost: float | None, most: float) -> bool:
    return cost is not None and cost <= most


def _cheaper(rework: Rework, rollback_steps: int | None) -> Choice:
    if rollback_steps is None:
        return Choice("partial", "there is no state of one step to go back to")
    if rework.iterations is None:
        return Choice(
            "partial",
            f"what it costs cannot be told ({rework.reason}); its perturbation is expected to be no larger than that "
            "of going back (Theorem 4.1)",
        )
    mode = "rollback" if rollback_steps < rework.iterations else "partial"
    return Choice(mode, f"predicted: partial {rework} iterations, rollback {rollback_steps}")
