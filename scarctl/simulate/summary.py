"""Summarize a study's trials: means with intervals (`scarctl.simulate.intervals`).

Trials are independent runs, and each measures every cell on the same failure. So a reduction compares both of its sides
in the same trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scarctl.simulate.intervals import Mean, mean_of, ratio_of
from scarctl.simulate.study import Cell, Study
from scarctl.util.document import INLINE, Document


@dataclass(frozen=True, slots=True)
class CellMeans(Document):
    """The means of one cell's trials, in iterations."""

    cell: Cell = field(metadata=INLINE)
    rework: Mean
    median: float
    """Median of the trials' iterations. If it is far from the mean, single trials decide the mean."""
    reduction: Mean | None
    """1 - rework / the rollback's rework. None if the study has no rollback, or the rollback costs nothing."""
    versus_round: Mean | None
    """Rework less that of taking turns, in the same failures; below 0, this policy costs less. None if the study does
    not take turns with this fraction and mode, and for "round" itself."""
    perturbation: float
    """Root mean square of the perturbations' norms."""
    given_up: int
    """Trials that did not reach the target. Their rework counts the iterations done."""
    oldest: dict[str, float] | None
    """Mean age of every parameter's oldest copy that differs from its live values at the failure, in iterations. None
    for a rollback, and for results that do not have it."""
    written: float | None
    """Mean over trials of the bytes that the way's checkpoints saved, relative to their budget. None if no trial has a
    checkpoint after the first iteration, and for results that do not have it."""


@dataclass(frozen=True, slots=True)
class Summary(Document):
    """The means of a study's trials."""

    trials: int
    undisturbed: float
    """Mean iterations of an undisturbed run."""
    irreproducible: int
    """Trials in which two runs of one seed differed."""
    cells: list[CellMeans]


def summarise(study: Study, results: Sequence[dict[str, Any]]) -> Summary:
    """Compute the means over `results`, one or more."""
    results = sorted(results, key=lambda result: int(result["trial"]))
    rework = np.array([result["rework"] for result in results], dtype=np.float64)
    moved = np.array([result["perturbation"] for result in results], dtype=np.float64)
    arrived = np.array([result["arrived"] for result in results], dtype=bool)
    cells = study.cells()
    rollback = next((k for k, cell in enumerate(cells) if cell.mode == "rollback"), None)
    turns = {
        (cell.mode, cell.fraction, cell.lost): k for k, cell in enumerate(cells) if cell.policy == "round"
    }
    lines = []
    for k, cell in enumerate(cells):
        reduction = None
        if rollback is not None and k != rollback and rework[:, rollback].mean() > 0:
            of = ratio_of(rework[:, k], rework[:, rollback])
            reduction = Mean(1 - of.mean, _less(of.high), _less(of.low))
        other = turns.get((cell.mode, cell.fraction, cell.lost), k)
        lines.append(
            CellMeans(
                cell,
                mean_of(rework[:, k]),
                float(np.median(rework[:, k])),
                reduction,
                None if other == k else mean_of(rework[:, k] - rework[:, other]),
                float(np.sqrt(np.mean(moved[:, k] ** 2))),
                int((~arrived[:, k]).sum()),
                _oldest([result["oldest"][k] if "oldest" in result else None for result in results]),
                _written([result["written"][k] if "written" in result else None for result in results]),
            )
        )
    undisturbed = float(np.mean([result["undisturbed"] for result in results]))
    return Summary(len(results), undisturbed, sum(not result["same"] for result in results), lines)


def _oldest(trials: Sequence[dict[str, int] | None]) -> dict[str, float] | None:
    found = [ages for ages in trials if ages is not None]
    if len(found) < len(trials):
        return None
    return {name: float(np.mean([ages[name] for ages in found])) for name in found[0]}


def _written(trials: Sequence[float | None]) -> float | None:
    found = [share for share in trials if share is not None]
    return float(np.mean(found)) if found else None


def _less(ratio: float | None) -> float | None:
    return None if ratio is None else 1 - ratio
