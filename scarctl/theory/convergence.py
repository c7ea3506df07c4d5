"""Estimate a run's convergence rate c and its distance to the optimum ‖x(0) - x*‖, with confidence intervals.

Under linear convergence two observable quantities decay by a known power of c:

    metric        floor + A (c²)^k   for a loss that is quadratic near its optimum
    increments    D (1 - c^g) c^k    for ‖x(k+g) - x(k)‖ of a run on a straight path, with D = ‖x(0) - x*‖

One fit serves both: y = floor + A ρ^k by least squares, ρ by search, A and the floor linearly. Increments have no
floor. They are divided by their gaps g, which may differ.

The interval is a profile likelihood: the set of all ρ with a residue below an F quantile. Autocorrelated residuals
count as fewer independent points. The result is `NoEstimate` in three cases: the interval includes ρ = 1, a power
of k fits better (SGD at falling rates), or the curve explains less than half of the variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scarctl.errors import UsageError

LEAST_POINTS = 8
LEAST_EXPLAINED = 0.5
"""Share of the values' variance that the curve must explain."""
WIDEST = 8.0
"""Largest accepted ratio between the two ends of the interval for 1 - c."""
CONFIDENCE = 0.95
_POWERS = np.linspace(0.25, 1.5, 6)
_BETTER = 0.7  # a power of k fits better if it leaves less than this share of the residue
_GRID = 400
_SLOWEST, _FASTEST = 0.02, 60.0  # decay over the whole history, in units of e

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Convergence:
    """An estimate, with intervals at a confidence of `CONFIDENCE`."""

    c: float
    """Factor by which the distance to the optimum shrinks in an iteration."""
    c_interval: tuple[float, float]
    x0_distance: float | None
    """‖x(0) - x*‖ at iteration 0; None for `fit_metric`, since a metric does not show it."""
    x0_interval: tuple[float, float] | None
    points: int
    profile: tuple[tuple[float, float, float], ...] = ()
    """(c, least ‖x(0) - x*‖, largest ‖x(0) - x*‖) for rates c over the interval. The estimates of c and of the distance
    are strongly correlated. () when the distance is None."""


@dataclass(frozen=True, slots=True)
class NoEstimate:
    """The history allows no estimate of the convergence rate."""

    reason: str


def fit_metric(steps: ArrayLike, metrics: ArrayLike) -> Convergence | NoEstimate:
    """Estimate c from a decreasing metric such as the loss. A metric does not show ‖x(0) - x*‖.

    steps: iterations, ascending, of shape (points,). metrics: of the same shape.
    Raises UsageError for other steps.
    """
    fit = _fit(steps, metrics)
    if isinstance(fit, NoEstimate):
        return fit
    if fit.amplitude <= 0:
        return NoEstimate("the metric does not decrease")
    # The metric is a square of the distance: ρ = c².
    interval = (math.exp(-fit.decays[1] / 2), math.exp(-fit.decays[0] / 2))
    return _checked(math.exp(-fit.decay / 2), interval, None, None, fit.points)


def fit_increments(steps: ArrayLike, increments: ArrayLike, gaps: ArrayLike) -> Convergence | NoEstimate:
    """Estimate c and ‖x(0) - x*‖ from the increments ‖x(k + gap) - x(k)‖ at the iterations k in `steps`.

    steps: ascending, of shape (points,). Iteration 0 is the origin of `steps`, which may be negative.
    increments: of the same shape. gaps: iterations, 1 or more, a scalar or of the same shape.
    Raises UsageError for other steps or gaps.
    """
    k, g = np.asarray(steps, np.float64).reshape(-1), np.asarray(gaps, np.float64)
    if not (g >= 1).all() or g.shape not in ((), k.shape):
        raise UsageError(f"gaps is {g}: give iterations, 1 or more, as one number or one for each step")
    fit = _fit(steps, increments, gaps=np.broadcast_to(g, k.shape))
    if isinstance(fit, NoEstimate):
        return fit
    if fit.amplitude <= 0:
        return NoEstimate("the run's increments do not decrease")
    interval = (math.exp(-fit.decays[1]), math.exp(-fit.decays[0]))
    profile = tuple((math.exp(-decay), low, high) for decay, low, high in fit.profile)
    return _checked(math.exp(-fit.decay), interval, fit.amplitude, fit.amplitudes, fit.points, profile)


@dataclass(frozen=True, slots=True)
class _Fit:
    decay: float
    """-log ρ, per iteration."""
    decays: tuple[float, float]
    amplitude: float
    """The decaying part at iteration 0."""
    amplitudes: tuple[float, float]
    points: int
    profile: tuple[tuple[float, float, float], ...]
    """(decay, least amplitude, largest amplitude), by ascending decay."""


def _checked(
    c: float,
    interval: tuple[float, float],
    x0: float | None,
    x0_interval: tuple[float, float] | None,
    points: int,
    profile: tuple[tuple[float, float, float], ...] = (),
) -> Convergence | NoEstimate:
    if not (0 < c < 1 and interval[0] > 0 and interval[1] < 1):
        return NoEstimate("the run may be standing still: its convergence rate may be 1")
    if (1 - interval[0]) > WIDEST * (1 - interval[1]):
        return NoEstimate(
            f"c lies anywhere from {interval[0]:.4g} to {interval[1]:.4g}: the history is too noisy or too short"
        )
    if x0_interval is not None and not 0 < x0_interval[0] <= x0_interval[1] < math.inf:
        return NoEstimate("the history gives no distance to the optimum")
    return Convergence(c, interval, x0, x0_interval, points, profile)


@dataclass(frozen=True, slots=True)
class _Data:
    k: Floats
    y: Floats
    gaps: Floats | None
    """Gaps of increments, by which `y` is divided; the curve then has no floor. None: `y` is a metric, with a floor."""

    def solve(self, decay: float) -> tuple[float, float, float, Floats]:
        """Return the amplitude, its error per unit of noise, the residual sum of squares and the residuals."""
        k, y = self.k, self.y
        curve = np.exp(-decay * k)
        if self.gaps is None:
            amplitude, square, rest = _with_floor(curve, y)
        else:
            curve *= -np.expm1(-decay * self.gaps) / self.gaps
            square = max(float(curve @ curve), 1e-300)
            amplitude = float(curve @ y) / square
            rest = y - amplitude * curve
        return amplitude, 1 / math.sqrt(square), float(rest @ rest), rest

    def residue(self, decay: float) -> float:
        return self.solve(decay)[2]


def _fit(steps: ArrayLike, values: ArrayLike, gaps: Floats | None = None) -> _Fit | NoEstimate:
    """Fit y = floor + A exp(-decay k); with gaps y = A exp(-decay k) (1 - exp(-decay gap))."""
    k, y = np.asarray(steps, np.float64).reshape(-1), np.asarray(values, np.float64).reshape(-1)
    if k.shape != y.shape or (np.diff(k) <= 0).any():
        raise UsageError("give one value for each step, and the steps in ascending order")
    if len(k) < LEAST_POINTS:
        return NoEstimate(f"{len(k)} of {LEAST_POINTS} points")
    if not np.isfinite(y).all():
        return NoEstimate("the history has values that are not finite")
    data = _Data(k, y if gaps is None else y / gaps, gaps)
    y = data.y
    spread = float(np.sum((y - y.mean()) ** 2))
    if spread <= (1e-12 * max(1e-300, float(np.abs(y).max()))) ** 2:
        return NoEstimate("nothing changes in the history")
    grid = np.geomspace(_SLOWEST, _FASTEST, _GRID) / float(k[-1] - k[0])
    residues = np.array([data.residue(decay) for decay in grid])
    best = int(residues.argmin())
    decay = _refine(data, grid[max(best - 1, 0)], grid[min(best + 1, _GRID - 1)])
    amplitude, spread_of_amplitude, residue, rest = data.solve(decay)
    if residue > (1 - LEAST_EXPLAINED) * spread:
        return NoEstimate(
            "the history does not converge: a decaying curve explains less than half of its variance"
        )
    parameters = 3 if gaps is None else 2
    independent = max(parameters + 1.0, _independent(rest))
    freedom = independent - parameters
    if _power_residue(k, y) < _BETTER * residue:
        return NoEstimate("the run converges sublinearly, like a power of the iterations")
    # An F quantile of (1, freedom) is the square of Student's.
    allowed = residue * (1 + _student(freedom) ** 2 / freedom) + 1e-24 * spread
    inside = np.flatnonzero(residues <= allowed)
    low = min([decay, *grid[inside[:1]].tolist()])
    high = max([decay, *grid[inside[-1:]].tolist()])
    low = _edge(data, allowed, low, low * grid[0] / grid[1])
    high = _edge(data, allowed, high, high * grid[1] / grid[0])
    if low <= grid[0] or high >= grid[-1]:
        return NoEstimate("the run converges too slowly or too fast for a history of this length")
    ends = [data.solve(d)[0] for d in (low, high)]
    # The noise at a fixed decay adds to the amplitude's change over the decay's interval.
    margin = _student(freedom) * spread_of_amplitude * math.sqrt(residue / freedom)
    amplitudes = (min(*ends, amplitude) - margin, max(*ends, amplitude) + margin)
    return _Fit(
        decay, (low, high), amplitude, amplitudes, len(k), _profile(data, allowed, (low, decay, high))
    )


def _profile(
    data: _Data, allowed: float, decays: tuple[float, float, float]
) -> tuple[tuple[float, float, float], ...]:
    """Return the edge of the set of (decay, amplitude) whose residue is at most `allowed`."""
    low, best, high = decays
    points = [low]
    points += [float(d) for a, b in ((low, best), (best, high)) if b > a for d in np.geomspace(a, b, 9)[1:]]
    found = []
    for decay in points:
        amplitude, unit, residue, _ = data.solve(decay)
        margin = unit * math.sqrt(max(0.0, allowed - residue))
        found.append((decay, amplitude - margin, amplitude + margin))
    return tuple(found)


def _with_floor(curve: Floats, y: Floats) -> tuple[float, float, Floats]:
    """Fit y = floor + A curve. Return A, the curve's sum of squares about its mean, and the residuals."""
    shifted = curve - curve.mean()
    square = max(float(shifted @ shifted), 1e-300)
    amplitude = float(shifted @ y) / square
    return amplitude, square, (y - y.mean()) - amplitude * shifted


def _power_residue(k: Floats, y: Floats) -> float:
    """Return the least residual sum of squares of y = floor + A (k + k0)^-p, sublinear convergence."""
    since, span = k - k[0], float(k[-1] - k[0])
    starts = span * np.array([1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16])
    rests = (_with_floor((since + start) ** -power, y)[2] for start in starts for power in _POWERS)
    return min(float(rest @ rest) for rest in rests)


def _refine(data: _Data, low: float, high: float) -> float:
    """Return the decay of least residue between `low` and `high`, by golden-section search."""
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - golden * (high - low), low + golden * (high - low)
        if data.residue(a) <= data.residue(b):
            high = b
        else:
            low = a
    return (low + high) / 2


def _edge(data: _Data, allowed: float, inside: float, outside: float) -> float:
    """Return the decay between `inside` and `outside` at which the residue passes `allowed`, by bisection."""
    for _ in range(40):
        middle = (inside + outside) / 2
        if data.residue(middle) <= allowed:
            inside = middle
        else:
            outside = middle
    return inside


def _independent(rest: Floats) -> float:
    """Return the effective number of independent points of AR(1) residuals."""
    square = float(rest @ rest)
    if square <= 0:
        return float(len(rest))
    alike = min(max(float(rest[1:] @ rest[:-1]) / square, 0.0), 0.99)
    return len(rest) * (1 - alike) / (1 + alike)


def _student(freedom: float) -> float:
    """Return the two-sided quantile of Student's t by the Cornish-Fisher expansion; 1 % off at 3 degrees of freedom."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
