"""Draw the experiment's results as the paper does, and write its tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from examples.paper.figures import Panel, Series, draw
from examples.parameter_server.experiment import WAYS, Plan

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc3311", "#9467bd", "#000000")  # the paper's, and ours


def interval(values: Sequence[float]) -> str:
    """Return the mean with the half width of its 95 % interval (Student's t); the mean alone of one value."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return f"{mean:.3f}"
    t = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}.get(count, 2.26)
    return f"{mean:.3f} ± {t * stdev(values) / math.sqrt(count):.3f}"


def figures(results: Sequence[dict[str, Any]], plan: Plan, folder: Path) -> None:
    """Write accuracy.svg (one kill and two) and costs.svg (two kills): means over seeds by tick."""

    def panel(title: str, up: str, killed: int, values: Callable[[dict[str, Any]], Sequence[float]]) -> Panel:
        lines = []
        for way, colour in zip(WAYS, COLOURS, strict=True):
            chosen = [values(r) for r in results if r["way"] == way and r["killed"] == killed]
            points = [((n + 1.0) * plan.look, fmean(at)) for n, at in enumerate(zip(*chosen, strict=True))]
            lines.append(Series(way, points, line=True, colour=colour, dashed=way.startswith("sync")))
        return Panel(title, "ticks", up, lines)

    drawn = [panel(f"kills: {kills}", "accuracy", kills, lambda r: r["accuracy"]) for kills in (1, 2)]
    (folder / "accuracy.svg").write_text(draw("Accuracy", drawn), encoding="utf-8")
    costs = [
        panel("gradients handled", "gradients", 2, lambda r: r["gradients"]),
        panel("workers that compute", "part", 2, lambda r: r["busy"]),
        panel("memory of servers and backlog", "MB", 2, lambda r: [m / 1e6 for m in r["memory"]]),
    ]
    (folder / "costs.svg").write_text(draw("Costs, killed twice", costs), encoding="utf-8")


HEADS = "| way | kills | before | after | end | gradients | workers busy | less no kill | ours less this |"


def table(results: Sequence[dict[str, Any]], plan: Plan) -> str:
    """Accuracy before and after the first kill and at the end, gradients, and how busy workers were without a server.

    Before and end are means of four looks: a look differs from the next by several hundredths. The last two compare the
    accuracy after the kill with that of the same run without one, and ours with it, paired by seed.
    """
    first = plan.kills[0] // plan.look
    gone = range(first, (plan.kills[0] + plan.away) // plan.look)
    after = {(r["way"], r["killed"], r["seed"]): fmean(r["accuracy"][first:]) for r in results}
    lines = [HEADS, "|" + " --- |" * HEADS.count(" | ") + " --- |"]
    for killed, way in itertools.product((0, 1, 2), WAYS):
        chosen = [r for r in results if r["way"] == way and r["killed"] == killed]
        if chosen:
            seeds = [r["seed"] for r in chosen]
            calm = "sync chain" if way.startswith("sync") else "async chain"
            cells = [
                interval([fmean(r["accuracy"][max(0, first - 4) : first]) for r in chosen]),
                interval([after[way, killed, seed] for seed in seeds]),
                interval([fmean(r["accuracy"][-4:]) for r in chosen]),
                f"{fmean(r['gradients'][-1] for r in chosen):.0f}",
                f"{100 * fmean(r['busy'][n] for r in chosen for n in gone):.0f} %",
                interval([after[way, killed, seed] - after[calm, 0, seed] for seed in seeds]),
                interval([after["ours", killed, seed] - after[way, killed, seed] for seed in seeds])
                if killed
                else "",
            ]
            lines.append(f"| {way} | {killed} | {' | '.join(cells)} |")
    return "\n".join(lines)
