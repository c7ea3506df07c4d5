"""The tables of docs/beyond.md, from what studies show."""

from __future__ import annotations

from examples.beyond.studies import INTERVAL, PAIRS, SAMPLED, SLOTS
from examples.paper.markdown import less, pick, table
from examples.paper.studies import EIGHTH, ONE
from scarctl.simulate.summary import CellMeans, Summary

Summaries = dict[str, dict[str, Summary]]
POLICIES = ("random", "round", "priority")


def policies(found: Summaries) -> str:
    """Rework by policy, and squared perturbations."""
    head = ["", "trials", "undisturbed", "rollback", "partial, all", *(f"{name} 1/8" for name in POLICIES)]
    rows = [[*head, "priority: less than rollback", *(f"δ² {name}" for name in POLICIES)]]
    for pair in PAIRS:
        summary = found.get(pair.name, {}).get("policies")
        if not summary:
            continue
        everything = pick(summary, "partial", ONE)
        lines = [pick(summary, "partial", EIGHTH, policy=policy) for policy in POLICIES]
        rows.append(
            [pair.title, str(summary.trials), f"{summary.undisturbed:.0f}"]
            + [_cost(line) for line in (pick(summary, "rollback", ONE), everything, *lines)]
            + [less(lines[-1])]
            + [f"{(line.perturbation / everything.perturbation) ** 2:.2f}x" for line in lines]
        )
    return table(rows)


def moments(found: Summaries) -> str:
    """What becomes of an optimizer's moments."""
    rows = [["", "trials", "C", "rollback", "rework", "less than rollback"]]
    ways = {
        "policies": ("restored with the row", INTERVAL),
        "kept": ("unchanged: only parameters were lost", INTERVAL),
        "stale": (f"from a copy of all moments, made every {INTERVAL} iterations", INTERVAL),
        "zeroed": ("zero", INTERVAL),
        "rare": ("restored with the row", SLOTS * INTERVAL),
        "zeroed ": ("only parameters are saved, moments are zero", INTERVAL),
    }
    for pair in PAIRS:
        of = found.get(pair.name, {})
        for name, (what, interval) in ways.items():
            if "rare" in of and name.strip() in of:
                summary = of[name.strip()]
                line = pick(summary, "partial", EIGHTH)
                costs = [_cost(pick(summary, "rollback", ONE)), _cost(line), less(line)]
                rows.append([f"{pair.title}: {what}", str(summary.trials), str(interval), *costs])
    return table(rows)


def sampled(found: Summaries) -> str:
    """Ranking by fewer coordinates."""
    rows = [["", "trials", "coordinates", "rework", "less than rollback", "δ²"]]
    for pair in PAIRS:
        of = found.get(pair.name, {})
        if f"sampled-{SAMPLED[0]}" not in of:
            continue
        best = pick(of["policies"], "partial", EIGHTH)
        names = {"policies": "all"} | {f"sampled-{every}": f"1 in {every}" for every in SAMPLED}
        for name, coordinates in names.items():
            line = pick(of[name], "partial", EIGHTH)
            change = f"{(line.perturbation / best.perturbation) ** 2:.2f}x"
            rows.append([pair.title, str(of[name].trials), coordinates, _cost(line), less(line), change])
    return table(rows)


def _cost(line: CellMeans) -> str:
    return f"{line.rework.mean:.1f}{'+' if line.given_up else ''}"
