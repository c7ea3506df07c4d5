"""Compare predicted rework with simulated rework, to measure how good the predictions of `scarctl inspect` are.

The upper end of a predicted interval is the paper's bound. So the first measure is how often a failure costs at most
that. The others are how often its cost lies in the interval, and the rank correlation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.simulate.study import Cell, Study
from scarctl.theory.rework import Rework, choose
from scarctl.util.document import Document
from scarctl.util.text import aligned

BASES = ("distances", "ages")
_COLUMNS = (
    "predicted from",
    "saves",
    "lost",
    "unchanged",
    "estimates",
    "predicted",
    "simulated",
    "within bound",
    "within interval",
    "rank correlation",
)
_LEAST = 5
"""Least number of pairs for a rank correlation."""


@dataclass(frozen=True, slots=True)
class Row(Document):
    """Predictions of one cell, or of all of them, from distances or from ages."""

    cell: Cell | None
    """None: all cells together."""
    basis: str
    failures: int
    unchanged: int
    """Failures that lost only unchanged values. Their rework of 0 is not counted as a prediction."""
    estimates: int
    """Other failures with a prediction. The values below cover these alone."""
    predicted: float | None
    """Mean, in iterations."""
    simulated: float | None
    within_bound: float | None
    """Share whose rework is at most the interval's upper end."""
    within_interval: float | None
    correlation: float | None
    """Spearman's rank correlation of predicted and simulated rework. None with fewer than 5 pairs, or if all are
    equal."""


@dataclass(frozen=True, slots=True)
class Modes(Document):
    """Mean rework of a cell's failures, by mode of recovery."""

    cell: Cell
    partial: float
    rollback: float
    auto: float
    rolled_back: int
    """Failures after which "auto" rolls back."""


@dataclass(frozen=True, slots=True)
class Comparison(Document):
    """The rows and the modes of a study."""

    rows: list[Row]
    ways: list[Modes]
    """Empty if the study has no rollback."""

    def text(self) -> list[str]:
        """Return the lines of the tables."""
        table: list[tuple[str, ...]] = [_COLUMNS]
        for row in self.rows:
            table.append(
                (
                    row.basis,
                    *(("everything", "") if row.cell is None else _names(row.cell)),
                    str(row.unchanged),
                    f"{row.estimates} of {row.failures - row.unchanged}",
                    _number(row.predicted, ".2f"),
                    _number(row.simulated, ".2f"),
                    _number(row.within_bound, ".0%"),
                    _number(row.within_interval, ".0%"),
                    _number(row.correlation, ".2f"),
                )
            )
        lines = aligned(table)
        if self.ways:
            ways: list[tuple[str, ...]] = [
                ("saves", "lost", "partial", "rollback", "auto", "auto rolls back")
            ]
            for way in self.ways:
                costs = (f"{cost:.2f}" for cost in (way.partial, way.rollback, way.auto))
                ways.append((*_names(way.cell), *costs, str(way.rolled_back)))
            lines += ["", *aligned(ways)]
        return lines


def compare(study: Study, results: Sequence[dict[str, Any]]) -> Comparison:
    """Compare the prediction for each failure with its simulated rework.

    Raises UsageError without partial recoveries.
    """
    cells = study.cells()
    partial = [k for k, cell in enumerate(cells) if cell.mode == "partial"]
    if not partial:
        raise UsageError("only partial recoveries have predictions", hint="give --mode partial,rollback")
    back = next((k for k, cell in enumerate(cells) if cell.mode == "rollback"), None)
    rows = []
    for basis in BASES:
        pairs = {
            k: [(result["predicted"][k][basis], float(result["rework"][k])) for result in results]
            for k in partial
        }
        rows += [_row(cells[k], basis, pairs[k]) for k in partial]
        if len(partial) > 1:
            rows.append(_row(None, basis, [pair for k in partial for pair in pairs[k]]))
    ways = [] if back is None else [_ways(cells[k], k, back, results) for k in partial]
    return Comparison(rows, ways)


def _row(cell: Cell | None, basis: str, pairs: Sequence[tuple[dict[str, Any], float]]) -> Row:
    changed = [(p, cost) for p, cost in pairs if p["high"] != 0]
    unchanged = len(pairs) - len(changed)
    known = [
        (p["iterations"], p["low"], p["high"], cost) for p, cost in changed if p["iterations"] is not None
    ]
    if not known:
        return Row(cell, basis, len(pairs), unchanged, 0, None, None, None, None, None)
    predicted, low, high, cost = np.array(known, dtype=np.float64).T
    return Row(
        cell,
        basis,
        len(pairs),
        unchanged,
        len(known),
        float(predicted.mean()),
        float(cost.mean()),
        # Costs are whole iterations, so ends are rounded outwards.
        float((cost <= np.ceil(high)).mean()),
        float(((cost <= np.ceil(high)) & (cost >= np.floor(low))).mean()),
        rank_correlation(predicted, cost),
    )


def _ways(cell: Cell, k: int, back: int, results: Sequence[dict[str, Any]]) -> Modes:
    """Compute the rework of "auto": a rollback if that repeats fewer iterations than predicted from distances."""
    partial = np.array([result["rework"][k] for result in results], dtype=np.float64)
    rollback = np.array([result["rework"][back] for result in results], dtype=np.float64)
    goes = np.array(
        [_goes_back(result["predicted"][k]["distances"], result["rollback_steps"]) for result in results]
    )
    auto = np.where(goes, rollback, partial)
    return Modes(cell, float(partial.mean()), float(rollback.mean()), float(auto.mean()), int(goes.sum()))


def _goes_back(predicted: dict[str, Any], rollback_steps: int) -> bool:
    return choose("auto", Rework(**predicted), rollback_steps).mode == "rollback"


def rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Return Spearman's rank correlation. Equal values share the mean of their ranks."""
    if len(a) < _LEAST:
        return None
    ranks = [_ranks(values) for values in (a, b)]
    centred = [values - values.mean() for values in ranks]
    scale = float(np.linalg.norm(centred[0]) * np.linalg.norm(centred[1]))
    return float(centred[0] @ centred[1]) / scale if scale > 0 else None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return means


def _names(cell: Cell) -> tuple[str, str]:
    return f"{cell.policy} {cell.fraction}" if cell.fraction != 1 else "all", str(cell.lost)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
