"""Predict the rework of a recovery, and choose between partial recovery and rollback.

The rework of a partial recovery follows from Theorem 3.2 of the SCAR paper and the run's estimated convergence rate
(`scarctl.theory.history`). The bound is the upper end of the predicted interval: a perturbation straight away from the
optimum. The expected value assumes that the lost part moves back along the path on which it came.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scarctl.errors import ScarError
from scarctl.theory.bounds import rework_at_angle, rework_bound_now, rework_bound_of_ages
from scarctl.theory.convergence import Convergence, NoEstimate
from scarctl.theory.history import History
from scarctl.util.document import Document


@dataclass(frozen=True, slots=True)
class Rework(Document):
    """The predicted rework of a recovery, in iterations."""

    iterations: float | None
    """Expected rework; None: no estimate."""
    low: float | None = None
    """Smallest expected rework over the 95 % interval of the convergence estimate."""
    high: float | None = None
    """Largest bound over the same interval."""
    basis: str | None = None
    """"distances": from the distances of live values from their copies. "staleness": from the same distances in
    iterations at the run's present speed, where no convergence rate fits. "ages": from the ages of the copies, as if
    every part moved straight. "steps": the repeated iterations, exactly."""
    reason: str | None = None
    """Why there is no estimate."""

    def __str__(self) -> str:
        if self.iterations is None or self.low is None or self.high is None:
            return "no estimate"
        if self.low == self.high:
            return f"{self.iterations:.10g}"
        return f"{self.iterations:.3g} ({self.low:.3g} to {self.high:.3g})"

    def at_most(self, steps: int) -> Rework:
        """Return the same, with no number above `steps`."""
        if self.iterations is None or self.low is None or self.high is None or self.high <= steps:
            return self
        most = float(steps)
        return replace(self, iterations=min(self.iterations, most), low=min(self.low, most), high=most)


def repeated(steps: int) -> Rework:
    """Return the rework of a rollback over `steps` iterations, which is exact."""
    return Rework(float(steps), float(steps), float(steps), "steps")


@dataclass(frozen=True, slots=True)
class Outlook:
    """A run's estimated convergence and movement at one iteration, and the rework predicted from them."""

    step: int
    convergence: Convergence | NoEstimate
    """`x0_distance` is ‖x(step) - x*‖."""
    speed: float | None = None
    """Distance that the parameters move per iteration; None: unknown."""

    @staticmethod
    def of(step: int, parts: Sequence[History]) -> Outlook:
        """Estimate from the histories of all parts of a state."""
        if not parts or not all(part.points for part in parts):
            return Outlook(step, NoEstimate("no session has saved the run's movements"))
        return Outlook.after(step, History.joined(parts))

    @staticmethod
    def after(step: int, history: History) -> Outlook:
        """Estimate from the history of a whole state."""
        return Outlook(step, history.convergence(step), history.speed())

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Without an estimate the numbers are None, and `reason` says why."""
        fit = self.convergence
        if isinstance(fit, NoEstimate):
            names = ("c", "c_interval", "distance", "distance_interval", "points")
            return {**dict.fromkeys(names), "speed": self.speed, "reason": fit.reason}
        return {
            "c": fit.c,
            "c_interval": list(fit.c_interval),
            "distance": fit.x0_distance,
            "distance_interval": None if fit.x0_interval is None else list(fit.x0_interval),
            "points": fit.points,
            "speed": self.speed,
            "reason": None,
        }

    def of_perturbation(
        self, norm: float, share: float, *, age: float | None = None, since: int = 0
    ) -> Rework:
        """Predict the rework of a perturbation of this norm to a `share` of the state.

        age: see `mean_age`; None: unknown. since: iterations since `norm` was measured. The lost part's movement since
        then is added.
        """

        def bound(c: float, distance: float) -> float:
            moved = math.sqrt(share) * distance * math.expm1(-since * math.log(c)) if since else 0.0
            return rework_bound_now(c, distance, norm + moved)

        by_rate = self._over_the_interval(bound, share, "distances")
        by_staleness = self._of_staleness(norm, share, age, since)
        if by_staleness is None:
            return by_rate
        if by_rate.high is None:
            return replace(by_staleness, reason=by_rate.reason)
        # Few runs converge as evenly as (6) assumes. With adaptive rates (Adagrad) it was seen to be too low.
        return replace(by_rate, high=max(by_rate.high, by_staleness.high or 0.0))

    def staleness(self, norm: float) -> float | None:
        """Return the iterations in which the parameters now move by `norm`; None if that is unknown.

        This is B/M of elastic consistency (Nadiradze et al., 2.1): the delay of a worker that sees so old a state.
        """
        return None if self.speed is None else norm / self.speed

    def _of_staleness(self, norm: float, share: float, age: float | None, since: int) -> Rework | None:
        """Predict without a convergence rate: by the staleness, which (6) approaches for c near 1.

        A run that slows down has moved faster since its copies than it does now. So the staleness is at least the
        copies' age if the part has moved straight.
        """
        stale = self.staleness(norm)
        if stale is None or age is None:
            return None
        side = math.sqrt(share)
        expected = side * (max(stale, side * age) + side * since)
        return Rework(expected, 0.0, max(stale, age) + since, "staleness")

    def of_ages(self, ages: ArrayLike, share: float, counts: ArrayLike | None = None) -> Rework:
        """Predict the rework after a `share` of the state is restored from copies of these ages, in iterations.

        counts: copies of each age, of the same shape; default 1.
        """

        @functools.cache  # the profile has each rate twice, with two distances that ages do not need
        def bound(c: float) -> float:
            return rework_bound_of_ages(c, ages, math.sqrt(share), counts=counts)

        return self._over_the_interval(lambda c, _: bound(c), share, "ages")

    def _over_the_interval(self, bound: Callable[[float, float], float], share: float, basis: str) -> Rework:
        fit = self.convergence
        if isinstance(fit, NoEstimate):
            return Rework(None, reason=fit.reason)
        if fit.x0_distance is None or any(near <= 0 for _, near, _ in fit.profile):
            return Rework(None, reason="the history gives no distance to the optimum")
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
    age: float | None = None,
    since: int = 0,
) -> Rework:
    """Predict the rework after a `share` of the state is restored from its copies.

    norm: l2 norm of the perturbation, measured `since` iterations ago; None: unknown, and the ages are used.
    ages: of the copies, in iterations. counts: copies of each age, of the same shape; default 1.
    age: see `mean_age`; None: unknown.

    It is at most the number of iterations so far: training all of them again costs no more. Only a run that diverges
    from the mixed state may cost more, and no prediction covers that.
    """
    old = np.asarray(ages, dtype=np.float64)
    if not old.size or (norm is None and not old.any()):
        return Rework(0.0, 0.0, 0.0, "ages")
    if norm == 0.0 and not since:
        return Rework(0.0, 0.0, 0.0, "distances")
    if norm is None:
        return outlook.of_ages(old, share, counts).at_most(outlook.step)
    return outlook.of_perturbation(norm, share, age=age, since=since).at_most(outlook.step)


def mean_age(distance: NDArray[np.float64], ages: NDArray[Any]) -> float | None:
    """Return the root mean square age of copies, weighted by squared distance. None: no distances.

    distance: of the live values from their copies. ages: of the copies, in iterations. Both have the shape (copies,).
    """
    norm = float(np.linalg.norm(distance))
    return float(np.linalg.norm(distance * ages)) / norm if 0 < norm < math.inf else None


def grouped(ages: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct ages, ascending, and the count of each."""
    # Not np.unique: it loads numpy.ma, which delays the start of every command.
    ordered = np.sort(ages)
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)])
    return ordered[first], np.diff(np.append(first, len(ordered)))


@dataclass(frozen=True, slots=True)
class Cost(Document):
    """The predicted cost of a recovery, for its report."""

    rework: Rework
    """Predicted for the chosen mode."""
    rollback_steps: int | None
    """Iterations that a rollback to the newest sealed state repeats; None when there is no sealed state."""
    reason: str | None = None
    """Why this mode was chosen; None when the caller named it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen mode of a recovery."""

    mode: str
    """"partial" or "rollback"."""
    reason: str | None = None
    """Why; None when the caller named the mode."""

    def cost(self, rework: Rework, rollback_steps: int | None) -> Cost:
        """Return the cost for the report. rework: of a partial recovery."""
        back = self.mode == "rollback" and rollback_steps is not None
        return Cost(repeated(rollback_steps or 0) if back else rework, rollback_steps, self.reason)


def choose(mode: str, rework: Rework, rollback_steps: int | None, most: float | None = None) -> Choice:
    """Choose the mode with less predicted rework; partial if there is no estimate.

    mode: "auto", or the mode to use. rework: of a partial recovery. rollback_steps: None when there is no sealed state.
    most: iterations that the recovery may cost. The upper end of the prediction counts.

    Raises ScarError (kind "too-much-rework") when the cost may exceed `most` or is unknown.
    """
    back = None if rollback_steps is None else repeated(rollback_steps)
    choice = Choice(mode) if mode != "auto" else _cheaper(rework, rollback_steps)
    if most is None:
        return choice
    costs = {"partial": rework.high, "rollback": None if back is None else back.high}
    if mode == "auto" and not _within(costs[choice.mode], most):
        other = "rollback" if choice.mode == "partial" else "partial"
        if _within(costs[other], most):
            choice = Choice(other, f"costs at most {most:g} iterations, and {choice.mode} may cost more")
    if _within(costs[choice.mode], most):
        return choice
    cost = costs[choice.mode]
    what = "a partial recovery" if choice.mode == "partial" else "a rollback"
    why = (
        f"may cost {cost:.3g} iterations"
        if cost is not None
        else f"has no predicted cost: {rework.reason or 'there is no sealed state'}"
    )
    raise ScarError(
        f"{what} {why}; at most {most:g} are allowed",
        hint="nothing was changed; allow more (--max-rework), or another mode (--mode auto)",
        kind="too-much-rework",
    )


def _within(cost: float | None, most: float) -> bool:
    return cost is not None and cost <= most


def _cheaper(rework: Rework, rollback_steps: int | None) -> Choice:
    if rollback_steps is None:
        return Choice("partial", "there is no sealed state")
    if rework.iterations is None or rework.basis == "staleness":
        # A staleness bounds the rework well, but is often several times the actual rework.
        return Choice(
            "partial",
            f"no convergence rate ({rework.reason}); its perturbation is expected to be at most that of a rollback "
            "(Theorem 4.1)",
        )
    mode = "rollback" if rollback_steps < rework.iterations else "partial"
    return Choice(mode, f"predicted: partial {rework} iterations, rollback {rollback_steps}")
