"""Summarize a study's trials: means with bootstrap intervals.

Trials are independent runs, and each measures every cell on the same failure. So the bootstrap draws trials, and a
reduction's interval draws both of its sides from the same trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.simulate.study import Cell, Study

DRAWS = 4000
_PERCENT = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its 95 % interval; None with too few trials."""

    mean: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Line:
    """The means of one cell's trials."""

    cell: Cell
    rework: Mean
    """Iterations."""
    reduction: Mean | None
    """1 - rework / the rollback's rework. None if the study has no rollback, or the rollback costs nothing."""
    perturbation: float
    """Root mean square of the perturbations' norms."""
    given_up: int
    """Trials that did not reach the target. Their rework is that of the iterations done."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.cell.to_json(),
            "rework": self.rework.to_json(),
            "reduction": None if self.reduction is None else self.reduction.to_json(),
            "perturbation": self.perturbation,
            "given_up": self.given_up,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """The means of a study's trials."""

    trials: int
    undisturbed: float
    """Mean iterations of an undisturbed run."""
    irreproducible: int
    """Trials in which two runs of one seed differed."""
    lines: list[Line]

    def to_json(self) -> dict[str, Any]:
        return {
            "trials": self.trials,
            "undisturbed": self.undisturbed,
            "irreproducible": self.irreproducible,
            "cells": [line.to_json() for line in self.lines],
        }


def summarise(study: Study, results: Sequence[dict[str, Any]]) -> Summary:
    """Compute the means over `results`, one or more."""
    results = sorted(results, key=lambda result: int(result["trial"]))
    rework = np.array([result["rework"] for result in results], dtype=np.float64)
    moved = np.array([result["perturbation"] for result in results], dtype=np.float64)
    arrived = np.array([result["arrived"] for result in results], dtype=bool)
    draws = np.random.default_rng(0).integers(0, len(results), (DRAWS, len(results)))
    means = [_means(column, draws) for column in rework.T]
    cells = study.cells()
    rollback = next((k for k, cell in enumerate(cells) if cell.mode == "rollback"), None)
    lines = []
    for k, cell in enumerate(cells):
        reduction = None
        if rollback is not None and k != rollback and rework[:, rollback].mean() > 0:
            # A draw in which the rollback costs nothing has no reduction.
            good = means[rollback] > 0
            reduction = _mean(
                1 - float(rework[:, k].mean() / rework[:, rollback].mean()),
                1 - means[k][good] / means[rollback][good],
                len(results),
            )
        lines.append(
            Line(
                cell,
                _mean(float(rework[:, k].mean()), means[k], len(results)),
                reduction,
                float(np.sqrt(np.mean(moved[:, k] ** 2))),
                int((~arrived[:, k]).sum()),
            )
        )
    undisturbed = float(np.mean([result["undisturbed"] for result in results]))
    return Summary(len(results), undisturbed, sum(not result["same"] for result in results), lines)


def _means(values: NDArray[np.float64], draws: NDArray[np.int64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = values[draws].mean(axis=1)
    return result


def _mean(value: float, draws: NDArray[np.float64], trials: int) -> Mean:
    if trials < 2 or not len(draws):
        return Mean(value, None, None)
    low, high = np.percentile(draws, _PERCENT).tolist()
    return Mean(value, low, high)
