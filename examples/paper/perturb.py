"""Compare the cost of one perturbation with the bound of Theorem 3.2: the paper's figures 3, 5 and 6.

A run is perturbed once (or, in figure 3c, now and then), and continues until it is as good as the undisturbed one at
its end. The cost is how many iterations more that takes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.paper.lda import TopicModel, scaled_variation
from examples.paper.mlr import LogisticRegression
from scarctl.theory.bounds import rework_bound, rework_bound_now
from scarctl.theory.convergence import NoEstimate, fit_metric

Floats = NDArray[np.float64]
PATIENCE = 4
"""A run that needs so many times the iterations of the undisturbed one is given up, and counts with them."""


@dataclass
class Costs:
    """The costs of the perturbations of one panel."""

    title: str
    size: str = "norm of the perturbation"
    points: list[tuple[float, float]] = field(default_factory=list)
    """Size and cost."""
    bound: list[tuple[float, float]] = field(default_factory=list)
    """Size and bound, by rising size; no points if c is unknown."""

    @property
    def above(self) -> float:
        """The share of points that cost more than the bound; up to one more does not count, as iterations are whole."""
        sizes, bounds = zip(*self.bound, strict=True)
        return float(np.mean([cost > np.interp(size, sizes, bounds) + 1 for size, cost in self.points]))


def quadratic(trials: int, seed: int = 0) -> list[Costs]:
    """Figure 3: gradient descent on a quadratic in four dimensions, all trials at once."""
    random = np.random.default_rng(seed)
    shrink = 1 - np.geomspace(0.005, 0.5, 4)
    start = random.normal(size=4)
    at, end = 500, 1000
    path = np.linalg.norm(start * shrink ** np.arange(end + 1)[:, None], axis=1)
    epsilon, c = path[end], float((path[end] / path[at]) ** (1 / (end - at)))
    # The start that the later half of the run seems to come from: the fast directions are gone long before.
    x0 = float(path[at]) * c**-at
    # From a hundredth of the distance to the optimum at that moment to three times.
    sizes = path[at] * 10 ** random.uniform(-2, 0.5, (trials, 1))
    push = random.normal(size=(trials, 4))
    push *= sizes / np.linalg.norm(push, axis=1, keepdims=True)
    once = _cost(np.where(np.arange(end)[:, None, None] == at, push, 0.0), start, shrink, epsilon)
    single, summed = Costs("(a) one perturbation at iteration 500"), Costs("(b) the same, over Δ_T", "Δ_T")
    for size, cost in sorted(zip(sizes[:, 0].tolist(), once.tolist(), strict=True)):
        bound = rework_bound(c, x0, {at: size})
        for costs, x in ((single, size), (summed, size * c**-at)):
            costs.points.append((x, cost))
            costs.bound.append((x, bound))
    often = Costs("(c) perturbations with p = 0.001, over Δ_T", "Δ_T")
    hits = random.random((end, trials, 1)) < 0.001
    pushes = np.where(hits, random.normal(size=(end, trials, 4)) * path[:end, None, None] / 2, 0.0)
    found = []
    for cost, norms in zip(
        _cost(pushes, start, shrink, epsilon).tolist(), np.linalg.norm(pushes, axis=2).T, strict=True
    ):
        steps = {int(k): float(norms[k]) for k in np.flatnonzero(norms)}
        total = sum(norm * c**-k for k, norm in steps.items())
        found.append((total, cost, rework_bound(c, x0, steps)))
    often.points = [(total, cost) for total, cost, _ in sorted(found) if total]
    often.bound = [(total, bound) for total, _, bound in sorted(found) if total]
    return [single, summed, often]


def _cost(pushes: Floats, start: Floats, shrink: Floats, epsilon: float) -> NDArray[np.int64]:
    """Iterations more than len(pushes) until the distance stays at most epsilon; pushes: (iterations, trials, 4)."""
    x = np.tile(start, (pushes.shape[1], 1))
    last = np.zeros(len(x), dtype=np.int64)
    for k in range(PATIENCE * len(pushes)):
        if k < len(pushes):
            x = x + pushes[k]
        x = x * shrink
        last[np.linalg.norm(x, axis=1) > epsilon * (1 + 1e-9)] = k + 1
    return last + 1 - len(pushes)


def regression(
    workload: LogisticRegression, trials: int, at: int = 50, end: int = 100, far: int = 1000
) -> list[Costs]:
    """Figures 5a, 5b and 6a: MLR, perturbed at iteration 50 of 100. The optimum is where it is after 1,000."""
    random = np.random.default_rng(0)
    states, target = _history(workload, end, far, "w")
    optimum, x0 = states[far].astype(np.float64), states[0]
    distances = {k: float(np.linalg.norm(states[k] - optimum)) for k in (at, end)}
    # As fast as the run is from there on: at its beginning it is faster.
    c = (distances[end] / distances[at]) ** (1 / (end - at))
    away = (states[at] - optimum) / distances[at]

    def perturbed(kind: str) -> Iterator[Floats]:
        for _ in range(trials):
            size = distances[at] * 10 ** random.uniform(-1.5, 0)
            if kind == "reset":
                rows = random.permutation(len(x0)) < random.uniform(0, 1) * len(x0)
                yield np.where(rows[:, None], x0 - states[at], 0)
            elif kind == "away":
                yield size * away
            else:
                push = random.normal(size=x0.shape)
                yield size * push / np.linalg.norm(push)

    titles = {"random": "random", "away": "away from the optimum", "reset": "a share of rows reset"}
    result = []
    for kind, title in titles.items():
        costs = Costs(f"MLR on MNIST: {title}")
        for push in perturbed(kind):
            workload.state()["w"][:] = states[at] + push
            cost = _go_on(workload, at, end, target)
            costs.points.append((float(np.linalg.norm(push)), cost))
        costs.points.sort()
        costs.bound = [(size, rework_bound_now(c, distances[at], size)) for size, _ in costs.points]
        result.append(costs)
    return result


def topics(workload: TopicModel, trials: int, at: int = 6, end: int = 12, far: int = 100) -> Costs:
    """Figure 6b: LDA, a share of the documents reset at iteration 6 of 12. The optimum is where it is after 100."""
    random = np.random.default_rng(0)
    metrics: list[float] = []
    states, target = _history(workload, end, far, "topics", metrics)
    costs = Costs("LDA on Reuters: a share of documents reset", "total variation, scaled")
    for _ in range(trials):
        chosen = random.permutation(len(states[0])) < random.uniform(0, 1) * len(states[0])
        state = np.where(chosen[:, None], states[0], states[at])
        workload.state()["topics"][:] = state
        workload.recompute()
        costs.points.append((_variation(state, states[at]), _go_on(workload, at, end, target)))
    costs.points.sort()
    fit = fit_metric(range(at, far + 1), metrics[at - 1 :])
    if not isinstance(fit, NoEstimate):
        distance = _variation(states[at], states[far])
        costs.bound = [(size, rework_bound_now(fit.c, distance, size)) for size, _ in costs.points]
    return costs


def _variation(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(scaled_variation({"": torch.from_numpy(a)}, {"": torch.from_numpy(b)}).sum())


def _history(
    workload: Any, end: int, far: int, name: str, metrics: list[float] | None = None
) -> tuple[dict[int, Any], float]:
    """States by iteration, 0 and up to `end` and `far`, and the metric after `end`."""
    workload.reset(0)
    states, target = {0: copy.deepcopy(workload.state()[name])}, math.nan
    for k in range(1, far + 1):
        workload.step(k)
        if k <= end or k == far:
            states[k] = workload.state()[name].copy()
        if metrics is not None:
            metrics.append(workload.metric())
        if k == end:
            target = workload.metric()
    return states, target


def _go_on(workload: Any, at: int, end: int, target: float) -> int:
    """Cost of what was done to the state after iteration `at`."""
    for k in range(at + 1, PATIENCE * end + 1):
        workload.step(k)
        if workload.metric() <= target:
            break
    return k - end
