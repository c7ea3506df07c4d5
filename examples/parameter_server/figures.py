"""Draw the experiment's results as the paper does, and write its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.paper.figures import Panel, Series, draw
from examples.parameter_server.experiment import WAYS, Plan

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc3311", "#9467bd", "#000000")
"""The paper's, and black for ours."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def interval(values: Sequence[float]) -> str:
    """The mean with the half width of its 95 % interval (Student's t); the mean alone of one value."""
    mean, count = _mean(values), len(values)
    if count < 2:
        return f"{mean:.3f}"
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    t = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}.get(count, 2.0)
    return f"{mean:.3f} +- {t * deviation / math.sqrt(count):.3f}"


def figures(results: Sequence[dict[str, Any]], plan: Plan, folder: Path) -> None:
    """Write accuracy.svg (one kill and two) and costs.svg (two kills): means over seeds by tick."""

    def panel(title: str, up: str, killed: int, values: Callable[[dict[str, Any]], Sequence[float]]) -> Panel:
        lines = []
        for way, colour in zip(WAYS, COLOURS, strict=True):
            chosen = [values(r) for r in results if r["way"] == way and r["killed"] == killed]
            points = [((n + 1.0) * plan.look, _mean(at)) for n, at in enumerate(zip(*chosen, strict=True))]
            lines.append(Series(way, points, line=True, colour=colour, dashed=way.startswith("sync")))
        return Panel(title, "ticks", up, lines)

    once = panel("killed once", "accuracy", 1, lambda r: r["accuracy"])
    twice = panel("killed twice", "accuracy", 2, lambda r: r["accuracy"])
    (folder / "accuracy.svg").write_text(draw("Accuracy", [once, twice]), encoding="utf-8")
    costs = [
        panel("gradients handled", "gradients", 2, lambda r: r["gradients"]),
        panel("workers that compute", "part", 2, lambda r: r["busy"]),
        panel("memory of servers and backlog", "MB", 2, lambda r: [m / 1e6 for m in r["memory"]]),
    ]
    (folder / "costs.svg").write_text(draw("Costs, killed twice", costs), encoding="utf-8")


def table(results: Sequence[dict[str, Any]], plan: Plan) -> str:
    """Accuracy around the kills, gradients handled, and how busy workers were while the server was away first.

    Before and end are means of four looks: a look differs from the next by several hundredths.
    """
    heads = ("way", "kills", "before", "least after it", "mean after it", "end", "gradients", "workers busy")
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    first = plan.kills[0] // plan.look
    gone = range(first, (plan.kills[0] + plan.away) // plan.look)
    for killed in (0, 1, 2):
        for way in WAYS:
            chosen = [r for r in results if r["way"] == way and r["killed"] == killed]
            if not chosen:
                continue
            cells = [
                interval([_mean(r["accuracy"][max(0, first - 4) : first]) for r in chosen]),
                interval([min(r["accuracy"][first:]) for r in chosen]),
                interval([_mean(r["accuracy"][first:]) for r in chosen]),
                interval([_mean(r["accuracy"][-4:]) for r in chosen]),
                f"{_mean([r['gradients'][-1] for r in chosen]):.0f}",
                f"{100 * _mean([r['busy'][n] for r in chosen for n in gone]):.0f} %",
            ]
            lines.append(f"| {way} | {killed} | {' | '.join(cells)} |")
    return "\n".join(lines)
