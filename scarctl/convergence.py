"""How fast a run converges: c and ‖x(0) - x*‖ of the SCAR paper's bounds, estimated from what the run has shown.

Under linear convergence three things that a run can see decay by a known power of c, down to (or up to) a limit:

    metric        floor + A (c²)^k   for a loss that is quadratic near its optimum
    travelled     D - D c^k          for ‖x(k) - x(0)‖ of a run that goes straight: then D is ‖x(0) - x*‖
    increments    D (1 - c^g) c^k    for ‖x(k+g) - x(k)‖

So one fit does for all: y = floor + A ρ^k by least squares, ρ by search and the other two linearly (increments are
divided by their gaps g, which may differ). Its interval is
the set of all ρ that fit hardly worse (a profile likelihood), with as many independent points as the residuals' own
correlation leaves. Where that set does not tell ρ from 1, a power of k explains the history better (SGD at falling
rates), or the curve is not such a curve, the answer is `CannotTell`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scarctl.errors import UsageError

LEAST_POINTS = 8
LEAST_EXPLAINED = 0.5
"""Of the values' variance, what the curve has to explain."""
WIDEST = 8.0
"""Largest ratio between the two ends of an interval of 1 - c; a wider one tells nothing."""
_POWERS = np.linspace(0.25, 1.5, 6)
_BETTER = 0.7  # of the residue: a power of k that leaves less than that explains the history better
_GRID = 400
_SLOWEST, _FASTEST = 0.02, 60.0  # decay over the whole history, in units of e

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Convergence:
    """An estimate, with intervals of the confidence that was asked for."""

    c: float
    """Factor by which the distance to the optimum shrinks in an iteration."""
    c_interval: tuple[float, float]
    x0_distance: float | None
    """‖x(0) - x*‖ at iteration 0; None when what was seen does not show it."""
    x0_interval: tuple[float, float] | None
    points: int
    profile: tuple[tuple[float, float, float], ...] = ()
    """Rates in the interval, each with the least and the largest ‖x(0) - x*‖ that go with it: the two are far from
    independent. () when the latter is None."""


@dataclass(frozen=True, slots=True)
class CannotTell:
    """The history does not say how fast the run converges."""

    reason: str


def fit_metric(steps: ArrayLike, metrics: ArrayLike, *, confidence: float = 0.95) -> Convergence | CannotTell:
    """c from a metric that goes down, such as the loss; it does not show ‖x(0) - x*‖.

    steps: iterations, ascending, of the same length as `metrics`.
    """
    fit = _fit(steps, metrics, confidence)
    if isinstance(fit, CannotTell):
        return fit
    if fit.amplitude <= 0:
        return CannotTell("the metric does not go down")
    # The metric is a square of the distance: ρ = c².
    interval = (math.exp(-fit.decays[1] / 2), math.exp(-fit.decays[0] / 2))
    return _told(math.exp(-fit.decay / 2), interval, None, None, fit.points)


def fit_travelled(
    steps: ArrayLike, travelled: ArrayLike, *, confidence: float = 0.95
) -> Convergence | CannotTell:
    """c and ‖x(0) - x*‖ from ‖x(k) - x(0)‖, which is 0 at iteration 0."""
    fit = _fit(steps, travelled, confidence, shape="rise")
    if isinstance(fit, CannotTell):
        return fit
    if fit.amplitude >= 0:
        return CannotTell("the state does not move towards anything")
    return _both(fit, -fit.amplitude, (-fit.amplitudes[1], -fit.amplitudes[0]))


def fit_increments(
    steps: ArrayLike, increments: ArrayLike, gaps: ArrayLike, *, confidence: float = 0.95
) -> Convergence | CannotTell:
    """c and ‖x(0) - x*‖ from ‖x(k + gap) - x(k)‖ for the iterations k in `steps`.

    gaps: iterations, one for all or one for each. Iteration 0 is where `steps` count from: they may be negative.
    """
    k, g = np.asarray(steps, np.float64).reshape(-1), np.asarray(gaps, np.float64)
    if not (g >= 1).all() or g.shape not in ((), k.shape):
        raise UsageError(f"the gaps are {g} iterations, not 1 or more, for all or for each of the steps")
    fit = _fit(steps, increments, confidence, shape="fall", gaps=np.broadcast_to(g, k.shape))
    if isinstance(fit, CannotTell):
        return fit
    if fit.amplitude <= 0:
        return CannotTell("the steps of the run do not become smaller")
    return _both(fit, fit.amplitude, fit.amplitudes)


@dataclass(frozen=True, slots=True)
class _Fit:
    decay: float
    """-log ρ, per iteration."""
    decays: tuple[float, float]
    amplitude: float
    """Of the decaying part at iteration 0."""
    amplitudes: tuple[float, float]
    points: int
    profile: tuple[tuple[float, float, float], ...]
    """Decays from the lowest to the highest, each with the least and the largest amplitude that go with it."""


def _both(fit: _Fit, x0: float, x0_interval: tuple[float, float]) -> Convergence | CannotTell:
    interval = (math.exp(-fit.decays[1]), math.exp(-fit.decays[0]))
    sign = math.copysign(1.0, fit.amplitude)
    profile = tuple(
        (math.exp(-decay), min(sign * low, sign * high), max(sign * low, sign * high))
        for decay, low, high in fit.profile
    )
    return _told(math.exp(-fit.decay), interval, x0, x0_interval, fit.points, profile)


def _told(
    c: float,
    interval: tuple[float, float],
    x0: float | None,
    x0_interval: tuple[float, float] | None,
    points: int,
    profile: tuple[tuple[float, float, float], ...] = (),
) -> Convergence | CannotTell:
    if not (0 < c < 1 and interval[0] > 0 and interval[1] < 1):
        return CannotTell("convergence cannot be told from standing still")
    if (1 - interval[0]) > WIDEST * (1 - interval[1]):
        return CannotTell(
            f"c may be anything from {interval[0]:.4g} to {interval[1]:.4g}: the history is too noisy or short"
        )
    if x0_interval is not None and not 0 < x0_interval[0] <= x0_interval[1] < math.inf:
        return CannotTell("how far the optimum is cannot be told from the history")
    return Convergence(c, interval, x0, x0_interval, points, profile)


Shape = Literal["free", "rise", "fall"]
"""What is known of floor and amplitude: nothing; that they cancel at iteration 0; that the floor is 0."""


@dataclass(frozen=True, slots=True)
class _Data:
    k: Floats
    y: Floats
    shape: Shape
    gaps: Floats | None = None
    """Of increments, which `y` has been divided by."""

    def solve(self, decay: float) -> tuple[float, float, float, Floats]:
        """Amplitude, its error per unit of noise, residual sum of squares and residuals, for a given decay."""
        k, y = self.k, self.y
        curve = np.exp(-decay * k)
        if self.shape == "free":
            amplitude, square, rest = _with_floor(curve, y)
        else:
            if self.shape == "rise":
                curve = np.expm1(-decay * k)
            elif self.gaps is not None:
                curve *= -np.expm1(-decay * self.gaps) / self.gaps
            square = max(float(curve @ curve), 1e-300)
            amplitude = float(curve @ y) / square
            rest = y - amplitude * curve
        return amplitude, 1 / math.sqrt(square), float(rest @ rest), rest

    def residue(self, decay: float) -> float:
        return self.solve(decay)[2]


def _fit(
    steps: ArrayLike,
    values: ArrayLike,
    confidence: float,
    shape: Shape = "free",
    gaps: Floats | None = None,
) -> _Fit | CannotTell:
    """y = floor + A exp(-decay k); with gaps y = A exp(-decay k) (1 - exp(-decay gap))."""
    k, y = np.asarray(steps, np.float64).reshape(-1), np.asarray(values, np.float64).reshape(-1)
    if k.shape != y.shape or (np.diff(k) <= 0).any():
        raise UsageError("a history is one value for each of its ascending steps")
    if not 0 < confidence < 1:
        raise UsageError(f"the confidence is {confidence}, not between 0 and 1")
    if len(k) < LEAST_POINTS:
        return CannotTell(f"{len(k)} points: at least {LEAST_POINTS} are needed")
    if not np.isfinite(y).all():
        return CannotTell("the history has values that are not finite")
    data = _Data(k, y if gaps is None else y / gaps, shape, gaps)
    y = data.y
    spread = float(np.sum((y - y.mean()) ** 2))
    if spread <= (1e-12 * max(1e-300, float(np.abs(y).max()))) ** 2:
        return CannotTell("nothing changes in the history")
    grid = np.geomspace(_SLOWEST, _FASTEST, _GRID) / float(k[-1] - k[0])
    residues = np.array([data.residue(decay) for decay in grid])
    best = int(residues.argmin())
    decay = _refine(data, grid[max(best - 1, 0)], grid[min(best + 1, _GRID - 1)])
    amplitude, spread_of_amplitude, residue, rest = data.solve(decay)
    if residue > (1 - LEAST_EXPLAINED) * spread:
        return CannotTell(
            "the history does not look like convergence: a decaying curve explains less than half of it"
        )
    parameters = 3 if shape == "free" else 2
    independent = max(parameters + 1.0, _independent(rest))
    freedom = independent - parameters
    if _power_residue(k, y) < _BETTER * residue:
        return CannotTell("the run converges more slowly than linearly: like a power of the iterations")
    # F quantile of (1, freedom): the square of Student's.
    allowed = residue * (1 + _student(confidence, freedom) ** 2 / freedom) + 1e-24 * spread
    inside = np.flatnonzero(residues <= allowed)
    low = min([decay, *grid[inside[:1]].tolist()])
    high = max([decay, *grid[inside[-1:]].tolist()])
    low = _edge(data, allowed, low, low * grid[0] / grid[1])
    high = _edge(data, allowed, high, high * grid[1] / grid[0])
    if low <= grid[0] or high >= grid[-1]:
        return CannotTell("convergence is too slow or too fast for this history to tell")
    ends = [data.solve(d)[0] for d in (low, high)]
    # Noise of the amplitude at a given decay, on top of what the decay's own interval moves.
    margin = _student(confidence, freedom) * spread_of_amplitude * math.sqrt(residue / freedom)
    amplitudes = (min(*ends, amplitude) - margin, max(*ends, amplitude) + margin)
    return _Fit(
        decay, (low, high), amplitude, amplitudes, len(k), _profile(data, allowed, (low, decay, high))
    )


def _profile(
    data: _Data, allowed: float, decays: tuple[float, float, float]
) -> tuple[tuple[float, float, float], ...]:
    """The edge of all pairs of decay and amplitude whose residue is allowed."""
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
    """Least squares of y = floor + A curve: A, the square of the curve about its mean, and residuals."""
    shifted = curve - curve.mean()
    square = max(float(shifted @ shifted), 1e-300)
    amplitude = float(shifted @ y) / square
    return amplitude, square, (y - y.mean()) - amplitude * shifted


def _power_residue(k: Floats, y: Floats) -> float:
    """Residual sum of squares of the best y = floor + A (k + k0)^-p, sublinear convergence."""
    since, span = k - k[0], float(k[-1] - k[0])
    starts = span * np.array([1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16])
    rests = (_with_floor((since + start) ** -power, y)[2] for start in starts for power in _POWERS)
    return min(float(rest @ rest) for rest in rests)


def _refine(data: _Data, low: float, high: float) -> float:
    """The decay of least residue between two, by golden section."""
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - golden * (high - low), low + golden * (high - low)
        if data.residue(a) <= data.residue(b):
            high = b
        else:
            low = a
    return (low + high) / 2


def _edge(data: _Data, allowed: float, inside: float, outside: float) -> float:
    """Where between two decays the residue passes what is allowed."""
    for _ in range(40):
        middle = (inside + outside) / 2
        if data.residue(middle) <= allowed:
            inside = middle
        else:
            outside = middle
    return inside


def _independent(rest: Floats) -> float:
    """How many independent points residuals are worth whose neighbours are alike (AR(1))."""
    square = float(rest @ rest)
    if square <= 0:
        return float(len(rest))
    alike = min(max(float(rest[1:] @ rest[:-1]) / square, 0.0), 0.99)
    return len(rest) * (1 - alike) / (1 + alike)


def _student(confidence: float, freedom: float) -> float:
    """Two-sided quantile of Student's t, by Cornish and Fisher's expansion; exact in the limit, 1 % at 3."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
