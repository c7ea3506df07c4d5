"""Write numbers of a study as cells of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from examples.paper.studies import HALF, ONE
from scarctl.simulate.intervals import Mean
from scarctl.simulate.summary import CellMeans, Summary


def pick(
    summary: Summary, mode: str, fraction: Fraction, policy: str = "priority", lost: Fraction | None = HALF
) -> CellMeans:
    """Return the results of one cell's trials."""
    policy = "full" if fraction == ONE else policy
    wanted = (mode, policy, fraction, None if mode == "rollback" else lost)
    return next(
        line
        for line in summary.cells
        if (line.cell.mode, line.cell.policy, line.cell.fraction, line.cell.lost) == wanted
    )


def less(line: CellMeans) -> str:
    """Return how much less it costs than a rollback."""
    return percent(line.reduction)


def percent(mean: Mean | None) -> str:
    """Return a share with its interval, "-" for none."""
    if mean is None:
        return "-"
    if mean.low is None or mean.high is None:
        return f"{100 * mean.mean:.0f} %"
    return f"{100 * mean.mean:.0f} % ({100 * mean.low:.0f} to {100 * mean.high:.0f})"


def iterations(mean: Mean) -> str:
    """Return a number of iterations with its interval."""
    if mean.low is None or mean.high is None:
        return f"{mean.mean:.1f}"
    return f"{mean.mean:.1f} ({mean.low:.1f} to {mean.high:.1f})"


def rework(line: CellMeans) -> str:
    """Return the cost of a failure; "+" if runs were given up."""
    return iterations(line.rework) + ("+" if line.given_up else "")


def ways(found: Iterable[tuple[str, Summary]]) -> str:
    """Return a table of every way of saving and recovering, of models with their titles."""
    head = ["", "trials", "undisturbed", "saved", "rework", "median", "less than rollback", "versus in turn"]
    rows = [[*head, "δ²", "bytes"]]
    for title, summary in found:
        usual = pick(summary, "partial", ONE).perturbation
        first = [title, str(summary.trials), f"{summary.undisturbed:.0f}"]
        for line in summary.cells:
            back = line.cell.mode == "rollback"
            rows.append(
                [
                    *first,
                    "all, rolled back" if back else "all" if line.cell.fraction == ONE else line.cell.policy,
                    rework(line),
                    f"{line.median:g}",
                    "-" if back else less(line),
                    "-" if line.versus_round is None else iterations(line.versus_round),
                    f"{(line.perturbation / usual) ** 2:.2f}",
                    "-" if line.written is None else f"{100 * line.written:.0f} %",
                ]
            )
            first = ["", "", ""]
    return table(rows)


def table(rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, whose head is the first row."""
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *rest])
