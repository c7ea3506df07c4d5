"""Bound the rework that a perturbation costs: the formulas of the SCAR paper, as pure functions.

Numbers of equations and theorems are those of Qiao, Aragam, Zhang, Xing, "Fault Tolerance in Iterative-Convergent
Machine Learning" (arXiv:1810.07354); its Theorem 3.2 is Theorem 3.1 in the ICML text. Everywhere c is the rate of
(3), ‖f(x) - x*‖ <= c ‖x - x*‖ with 0 < c < 1. A rework cost is a number of iterations (the paper's iteration cost). A
bound holds in the worst case, and is infinite if the theorem has no bound. Every function raises UsageError for
arguments outside the stated range. `examples/paper/bounds.py` has the formulas of the paper's appendix.

`scarctl.theory.convergence` estimates c and ‖x(0) - x*‖ from a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from scarctl.errors import UsageError

_LARGEST = 300.0
"""Largest exponent: the square of a larger one's exponential overflows."""


def rework_bound(c: float, x0_distance: float, perturbations: Mapping[int, float]) -> float:
    """Return Theorem 3.2, (6): log(1 + Δ_T / ‖x(0) - x*‖) / log(1/c), with Δ_T = Σ c^-l E‖δ_l‖.

    x0_distance: ‖x(0) - x*‖, above 0. perturbations: the norm E‖δ_l‖ by iteration l. The bound is reached when every
    perturbation points straight away from the optimum.
    """
    _check_rate(c)
    _check("x0_distance", x0_distance, above=True)
    decay = -math.log(c)
    logs = []
    for step, norm in perturbations.items():
        _check("a perturbation", norm)
        if norm == math.inf:
            return math.inf
        if norm > 0:
            logs.append(math.log(norm) + step * decay)
    # Sum logarithms: c^-l overflows for the l of any real run.
    ratio = float(np.logaddexp.reduce(logs)) - math.log(x0_distance) if logs else -math.inf
    return float(np.logaddexp(0.0, ratio)) / decay


def rework_bound_now(c: float, distance: float, perturbation: float) -> float:
    """Return (6) for one perturbation at iteration T, given the distance to the optimum ‖x(T) - x*‖.

    Under linear convergence, ‖x(T) - x*‖ = c^T ‖x(0) - x*‖, this equals `rework_bound` of that perturbation.
    """
    return rework_bound(c, distance, {0: perturbation})


def rework_bound_of_ages(
    c: float, ages: ArrayLike, share: float = 1.0, *, counts: ArrayLike | None = None
) -> float:
    """Return (6) for a running checkpoint whose equal parts were saved `ages` iterations ago: log(1 + s M) / log(1/c).

    Under (3) a state has since moved at least (c^-age - 1) ‖x(T) - x*‖, with equality on a straight path. M is the root
    mean square of that over the parts, relative to ‖x(T) - x*‖. c = 1 is the limit of slow progress: s times the root
    mean square of the ages.

    ages: iterations, 0 or more, of shape (parts,). counts: parts of each age, of the same shape; default 1.
    share: s = ‖δ'‖ / ‖δ‖, the part of the movement that recovery undoes. It is 1 for a full recovery, and √p for a
        partial one of a share p (Theorem 4.2). A full recovery from a single age costs that age.
    """
    old = np.asarray(ages, dtype=np.float64).reshape(-1)
    weights = np.ones(len(old)) if counts is None else np.asarray(counts, dtype=np.float64).reshape(-1)
    if not len(old) or not (old >= 0).all():
        raise UsageError("ages are iterations, 0 or more")
    if weights.shape != old.shape or not (weights > 0).all():
        raise UsageError("give one count above 0 for each age")
    if not 0 <= share < math.inf:
        raise UsageError(f"share is {share}, not 0 or more")
    if share == 0 or not old.any():
        return 0.0
    if c == 1.0:
        return share * float(np.sqrt(np.average(np.square(old), weights=weights)))
    _check_rate(c)
    decay = -math.log(c)
    # Sum logarithms: c^-age overflows. Parts of age 0 have not moved, and log(0) is left out.
    grown = old * decay
    has_moved = grown > 0
    grown = grown[has_moved]
    moved = grown + np.log(-np.expm1(-grown))
    log_sum = float(np.logaddexp.reduce(2 * moved + np.log(weights[has_moved])))
    log_mean = (log_sum - math.log(float(weights.sum()))) / 2
    return float(np.logaddexp(0.0, math.log(share) + log_mean)) / decay


def rework_at_angle(c: float, bound: float, cosine: float) -> float:
    """Return the rework of a perturbation at an angle to x(T) - x*, where (3) holds with equality.

    log(‖x(T) - x* + δ‖ / ‖x(T) - x*‖) / log(1/c). A cosine of 1 gives `bound` itself, which is (6) for ‖δ‖. On a
    straight path, undoing some movement of a share p of the state has the cosine √p.
    """
    _check_rate(c)
    _check("bound", bound)
    if not -1 <= cosine <= 1:
        raise UsageError(f"cosine is {cosine}, not in -1..1")
    decay = -math.log(c)
    if bound * decay > _LARGEST:
        return bound  # x(T) - x* is negligible against so large a perturbation, whatever its angle
    ratio = math.expm1(bound * decay)
    return math.log1p(ratio * (2 * cosine + ratio)) / (2 * decay)


def _check_rate(c: float) -> None:
    if not 0 < c < 1:
        raise UsageError(f"c is {c}, not between 0 and 1")


def _check(name: str, value: float, *, above: bool = False) -> None:
    if not (value > 0 if above else value >= 0):
        raise UsageError(f"{name} is {value}, not {'above 0' if above else '0 or more'}")
