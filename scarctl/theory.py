"""What a perturbation costs: the bounds of the SCAR paper, as pure functions.

Numbers of equations and theorems are those of Qiao, Aragam, Zhang, Xing, "Fault Tolerance in Iterative-Convergent
Machine Learning" (arXiv:1810.07354); its Theorem 3.2 is Theorem 3.1 in the ICML text. Everywhere c is the rate of
(3), ‖f(x) - x*‖ <= c ‖x - x*‖ with 0 < c < 1, and a rework cost is a number of iterations (the paper's iteration
cost): what a bound says of it, it says in the worst case. Where a bound says nothing, it is infinite.

`scarctl.convergence` estimates c and ‖x(0) - x*‖ from a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from scarctl.errors import UsageError

SGD_LIMIT = 1_000_000
"""Iterations after which the recursion of SGD is taken not to arrive."""
_LARGEST = 300.0
"""Exponents above it are not taken: their squares overflow."""


def rework_bound(c: float, x0_distance: float, perturbations: Mapping[int, float]) -> float:
    """Theorem 3.2, (6): log(1 + Δ_T / ‖x(0) - x*‖) / log(1/c), with Δ_T = Σ c^-l E‖δ_l‖.

    perturbations: the norm E‖δ_l‖ by the iteration l at which it happened. A sequence that pushes straight away from
    the optimum costs exactly this.
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
    # c^-l overflows for the l of any real run, so the sum is taken of logarithms.
    ratio = float(np.logaddexp.reduce(logs)) - math.log(x0_distance) if logs else -math.inf
    return float(np.logaddexp(0.0, ratio)) / decay


def rework_bound_now(c: float, distance: float, perturbation: float) -> float:
    """(6) for one perturbation, given the distance to the optimum ‖x(T) - x*‖ at the moment when it happens.

    Where convergence is linear, ‖x(T) - x*‖ = c^T ‖x(0) - x*‖, it is `rework_bound` of that perturbation.
    """
    return rework_bound(c, distance, {0: perturbation})


def rework_bound_of_ages(
    c: float, ages: ArrayLike, share: float = 1.0, *, counts: ArrayLike | None = None
) -> float:
    """(6) for a running checkpoint whose equal parts were saved `ages` iterations ago: log(1 + s M) / log(1/c).

    Under (3) a state has moved at least (c^-age - 1) ‖x(T) - x*‖ since, and exactly that if it went straight. M is the
    root mean square of that over the parts, relative to ‖x(T) - x*‖. `share` is ‖δ'‖ / ‖δ‖, the part of the movement
    that recovery takes back: 1 for a full recovery, which from one age costs that age, and √p for a partial one of a
    share p (Theorem 4.2). c = 1 is the limit of progress that is slow beside the ages: s times their root mean square.
    counts: how many parts have each age; default one.
    """
    old = np.asarray(ages, dtype=np.float64).reshape(-1)
    weights = np.ones(len(old)) if counts is None else np.asarray(counts, dtype=np.float64).reshape(-1)
    if not len(old) or not (old >= 0).all():
        raise UsageError("ages are numbers of iterations, from 0 on")
    if weights.shape != old.shape or not (weights > 0).all():
        raise UsageError("counts are one number above 0 for each age")
    if not 0 <= share < math.inf:
        raise UsageError(f"share is {share}, not a number from 0 on")
    if share == 0 or not old.any():
        return 0.0
    if c == 1.0:
        return share * float(np.sqrt(np.average(np.square(old), weights=weights)))
    _check_rate(c)
    decay = -math.log(c)
    # Logarithms, because c^-age overflows. Parts that have just been saved have not moved.
    grown = old * decay
    has_moved = grown > 0
    grown = grown[has_moved]
    moved = grown + np.log(-np.expm1(-grown))
    log_sum = float(np.logaddexp.reduce(2 * moved + np.log(weights[has_moved])))
    log_mean = (log_sum - math.log(float(weights.sum()))) / 2
    return float(np.logaddexp(0.0, math.log(share) + log_mean)) / decay


def rework_at_angle(c: float, bound: float, cosine: float) -> float:
    """What a perturbation of this bound (6) costs that is at an angle to x(T) - x*, where (3) holds with equality.

    log(‖x(T) - x* + δ‖ / ‖x(T) - x*‖) / log(1/c): the bound itself for a cosine of 1. A share p of a run that goes
    straight, taken back some way, has the cosine √p: it is the same part of both vectors.
    """
    _check_rate(c)
    _check("the bound", bound)
    if not -1 <= cosine <= 1:
        raise UsageError(f"the cosine is {cosine}, not in -1..1")
    decay = -math.log(c)
    if bound * decay > _LARGEST:
        return bound  # so large a perturbation is all that is left, whatever its angle
    ratio = math.expm1(bound * decay)
    return math.log1p(ratio * (2 * cosine + ratio)) / (2 * decay)


def irreducible_error(c: float, perturbation: float) -> float:
    """Example 3.3: c / (1 - c) * Δ. With a perturbation of up to Δ in every iteration no run comes nearer."""
    _check_rate(c)
    _check("perturbation", perturbation)
    return c / (1.0 - c) * perturbation


def endless_rework_bound(c: float, x0_distance: float, perturbation: float, epsilon: float) -> float:
    """(14), Appendix B.1: perturbations of E‖δ_k‖ <= Δ in every iteration, for ever.

    Infinite unless both ε and ‖x(0) - x*‖ are above `irreducible_error`, where the bound is informative.
    """
    _check("x0_distance", x0_distance, above=True)
    _check("epsilon", epsilon, above=True)
    floor = irreducible_error(c, perturbation)
    if not floor < min(epsilon, x0_distance):
        return math.inf
    return (math.log1p(-floor / x0_distance) - math.log1p(-floor / epsilon)) / -math.log(c)


def sgd_rework_bound(
    rate: Callable[[int], float],
    gradient_bound: float,
    x0_distance: float,
    perturbations: Mapping[int, float],
    epsilon: float,
    *,
    limit: int = SGD_LIMIT,
) -> float:
    """Appendix B.2: the iterations that SGD needs with the perturbations, less those without, by its recursion (15).

    E‖x(k+1) - x*‖² <= (1 - α_k) E‖x(k) - x*‖² + α_k² G², where `rate` gives α_k for k = 0, 1, ... and
    `gradient_bound` is G. The perturbed recursion starts each iteration from (√E‖y(k) - x*‖² + √E‖δ_k‖²)², which
    Minkowski's inequality allows. (The appendix adds α² G², a square, to a norm in its closed form; so both
    recursions are stepped here.)

    perturbations: root mean squares √E‖δ_k‖² by iteration. Infinite when ε is not reached within `limit` iterations.
    """
    with_them = _sgd_iterations(rate, gradient_bound, x0_distance, perturbations, epsilon, limit)
    without = _sgd_iterations(rate, gradient_bound, x0_distance, {}, epsilon, limit)
    return math.inf if math.isinf(without) else with_them - without


def _sgd_iterations(
    rate: Callable[[int], float],
    gradient_bound: float,
    x0_distance: float,
    perturbations: Mapping[int, float],
    epsilon: float,
    limit: int,
) -> float:
    """Iterations after which the recursion is below ε, and no perturbation is still to come."""
    _check("epsilon", epsilon, above=True)
    _check("gradient_bound", gradient_bound)
    _check("x0_distance", x0_distance)
    last = max((step for step, norm in perturbations.items() if norm > 0), default=-1)
    distance = x0_distance
    for k in range(limit + 1):
        if distance < epsilon and k > last:
            return k
        alpha = rate(k)
        if not 0 <= alpha <= 1:
            raise UsageError(f"the rate of iteration {k} is {alpha}, not in 0..1")
        start = distance + perturbations.get(k, 0.0)
        distance = math.sqrt((1.0 - alpha) * start * start + (alpha * gradient_bound) ** 2)
    return math.inf


def partial_perturbation(full: float, lost: float) -> float:
    """Theorem 4.2: E‖δ'‖² = p ‖δ‖² for a share p lost at random. Returns √(p) ‖δ‖, the root mean square.

    E‖δ'‖ is at most that (Jensen), so it may go where a bound wants E‖δ'‖.
    """
    _check("the full perturbation", full)
    if not 0 <= lost <= 1:
        raise UsageError(f"the lost share is {lost}, not in 0..1")
    return math.sqrt(lost) * full


def elastic_constant(distances: Sequence[ArrayLike], rates: ArrayLike) -> float:
    """Least B for which observed mixed-step states are elastically consistent: E‖x_t - v_t‖² <= α_t² B².

    Nadiradze et al., "Elastic Consistency" (AAAI 2021), (12): v_t is the state that a recovery at t would leave or has
    left, x_t the one without it. The constant may not depend on t, so it is the largest over the moments t.

    distances: per moment the distances of all restored partitions from the live ones, of shape (partitions,), or of
    shape
        (samples, partitions), of which the mean square stands for E. Their squares add up to ‖x_t - v_t‖².
    rates: the learning rate α_t of every moment, above 0.
    """
    alphas = np.asarray(rates, dtype=np.float64).reshape(-1)
    if len(alphas) != len(distances) or not len(alphas):
        raise UsageError(f"{len(distances)} moments and {len(alphas)} learning rates: give one for each")
    if not (np.isfinite(alphas) & (alphas > 0)).all():
        raise UsageError("a learning rate is not a number above 0")
    squares = [
        float(np.mean(np.sum(np.square(np.atleast_2d(np.asarray(d, np.float64))), axis=1))) for d in distances
    ]
    return max(math.sqrt(square) / alpha for square, alpha in zip(squares, alphas.tolist(), strict=True))


def elastic_constant_of_staleness(staleness: ArrayLike, second_moments: ArrayLike) -> float:
    """An upper bound of the same B that needs no distances: √(Σ τ_i² M_i²), for SGD at a learning rate that only falls.

    A partition that is τ_i iterations stale lacks τ_i updates of at most E‖α g_i‖² <= α² M_i² each, so by Cauchy and
    Schwarz E‖x_i - v_i‖² <= α² τ_i² M_i², where α is the rate of the oldest of them.

    staleness: τ_i in iterations; second_moments: M_i², bounds of E‖g_i‖² of the partitions' gradients.
    """
    ages, moments = np.asarray(staleness, np.float64), np.asarray(second_moments, np.float64)
    if ages.shape != moments.shape or not (ages >= 0).all() or not (moments >= 0).all():
        raise UsageError("staleness and second moments are not one number each, from 0 on, per partition")
    return float(np.sqrt(np.sum(np.square(ages) * moments)))


def _check_rate(c: float) -> None:
    if not 0 < c < 1:
        raise UsageError(f"the convergence rate c is {c}, not between 0 and 1")


def _check(name: str, value: float, *, above: bool = False) -> None:
    if not (value > 0 if above else value >= 0):
        raise UsageError(f"{name} is {value}, not a number {'above 0' if above else 'from 0 on'}")
