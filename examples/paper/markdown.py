"""Numbers of a study as cells of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from examples.paper.studies import HALF, ONE
from scarctl.simulate.intervals import Mean
from scarctl.simulate.summary import CellMeans, Summary


def pick(
    summary: Summary, mode: str, fraction: Fraction, policy: str = "priority", lost: Fraction | None = HALF
) -> CellMeans:
    """What one cell's trials show."""
    policy = "full" if fraction == ONE else policy
    wanted = (mode, policy, fraction, None if mode == "rollback" else lost)
    return next(
        line
        for line in summary.cells
        if (line.cell.mode, line.cell.policy, line.cell.fraction, line.cell.lost) == wanted
    )


def less(line: CellMeans) -> str:
    """How much less it costs than a rollback."""
    return percent(line.reduction)


def percent(mean: Mean | None) -> str:
    """A share with its interval, "-" for none."""
    if mean is None:
        return "-"
    if mean.low is None or mean.high is None:
        return f"{100 * mean.mean:.0f} %"
    return f"{100 * mean.mean:.0f} % ({100 * mean.low:.0f} to {100 * mean.high:.0f})"


def table(rows: Iterable[list[str]]) -> str:
    """The first row is the head."""
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *rest])
