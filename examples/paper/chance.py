"""Compute how much C and p matter: the same failures, each counted as often as it would have come with p.

Trials fail at an iteration drawn from all before convergence. Where the failure's iteration is geometric instead, an
early failure is more likely by a known factor. Weighted by that factor, the same trials answer for every p (importance
sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.paper.markdown import percent, table
from examples.paper.studies import INTERVALS, PAIRS, Runs
from scarctl.simulate.intervals import Mean, ratio_of

RATES = (None, 0.02, 0.05, 0.1)
"""None: each iteration before convergence is as likely."""
_ROLLBACK, _BEST = 0, 2
"""Cells of the studies by C: a rollback, and priority 1/8."""


def chances(runs: Runs) -> str:
    """Priority 1/8 at loss 1/2, less than rollback, by C and p."""
    head = ["", "C", "trials", *("any" if p is None else f"p = {p}" for p in RATES)]
    rows = [[*head, f"trials that count, p = {RATES[-1]}"]]
    for pair in PAIRS:
        for interval in INTERVALS:
            results = runs.results(pair.name, f"interval-{interval}")
            if not results:
                continue
            means = [percent(reduction(results, weights(results, p))) for p in RATES]
            few = weights(results, RATES[-1])
            rows.append([pair.title, str(interval), str(len(results)), *means, f"{effective(few):.0f}"])
    return table(rows)


def weights(results: Sequence[dict[str, Any]], p: float | None) -> NDArray[np.float64]:
    """Return how much likelier each trial's failure is with p than where every iteration is as likely."""
    after = np.array([result["failed_after"] for result in results], dtype=np.float64)
    if p is None:
        return np.ones_like(after)
    last = np.array([result["undisturbed"] - 1 for result in results], dtype=np.float64)
    found: NDArray[np.float64] = p * (1 - p) ** (after - 1) / (1 - (1 - p) ** last) * last
    return found


def effective(weight: NDArray[np.float64]) -> float:
    """Trials of equal weight that would say as much (Kish)."""
    return float(weight.sum() ** 2 / np.square(weight).sum())


def reduction(results: Sequence[dict[str, Any]], weight: NDArray[np.float64]) -> Mean | None:
    """Return 1 - rework / the rollback's, of weighted means, with its interval."""
    rework = np.array([result["rework"] for result in results], dtype=np.float64)[:, [_ROLLBACK, _BEST]]
    back, best = (weight[:, None] * rework).T
    if back.mean() <= 0:
        return None
    of = ratio_of(best, back)
    return Mean(1 - of.mean, None if of.high is None else 1 - of.high, None if of.low is None else 1 - of.low)
