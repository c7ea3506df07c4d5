"""Bound the rework of perturbations without end, of SGD, and of a part lost at random: the paper's appendix.

Numbers are those of arXiv:1810.07354. c is the rate of linear convergence, (3). The other bounds, which scarctl itself
uses, are in `scarctl.theory.bounds`. Every function raises UsageError for arguments outside the stated range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from scarctl.errors import UsageError

SGD_LIMIT = 1_000_000
"""Iterations after which the SGD recursion is assumed not to reach ε."""


def irreducible_error(c: float, perturbation: float) -> float:
    """Return Example 3.3: c / (1 - c) * Δ, the least distance to x* under perturbations of Δ in every iteration."""
    _check_rate(c)
    _check("perturbation", perturbation)
    return c / (1.0 - c) * perturbation


def endless_rework_bound(c: float, x0_distance: float, perturbation: float, epsilon: float) -> float:
    """Return (14), Appendix B.1: the bound for perturbations of E‖δ_k‖ <= Δ in every iteration without end.

    Infinite unless both ε and ‖x(0) - x*‖ exceed `irreducible_error`: elsewhere the bound is not informative.
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
    """Return Appendix B.2: SGD's iterations to reach ε with the perturbations, less those without, by recursion (15).

    E‖x(k+1) - x*‖² <= (1 - α_k) E‖x(k) - x*‖² + α_k² G². The perturbed recursion starts each iteration from
    (√E‖y(k) - x*‖² + √E‖δ_k‖²)², by Minkowski's inequality. Both recursions are stepped: the appendix's closed form
    adds α² G², a square, to a norm.

    rate: returns α_k in 0..1 for k = 0, 1, ... gradient_bound: G. perturbations: root mean squares √E‖δ_k‖² by
    iteration. Infinite when ε is not reached within `limit` iterations.
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
    """Return the iterations after which the recursion is below ε and all perturbations are past."""
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
    """Return √p ‖δ‖, the root mean square perturbation for a share p lost at random (Theorem 4.2).

    By Jensen's inequality E‖δ'‖ is at most that: use it where a bound takes E‖δ'‖.
    """
    _check("full", full)
    if not 0 <= lost <= 1:
        raise UsageError(f"lost is {lost}, not in 0..1")
    return math.sqrt(lost) * full


def _check_rate(c: float) -> None:
    if not 0 < c < 1:
        raise UsageError(f"c is {c}, not between 0 and 1")


def _check(name: str, value: float, *, above: bool = False) -> None:
    if not (value > 0 if above else value >= 0):
        raise UsageError(f"{name} is {value}, not {'above 0' if above else '0 or more'}")
