"""Write the tables of docs/beyond.md from the results of studies."""

from __future__ import annotations

from examples.beyond.studies import DEFAULT, INTERVAL, PAIRS, SAMPLED, SLOTS
from examples.paper.markdown import iterations, less, pick, rework, table
from examples.paper.studies import EIGHTH, ONE, Runs
from scarctl.simulate.summary import Summary

Summaries = dict[str, dict[str, Summary]]


def moments(found: Summaries, runs: Runs) -> str:
    """Return the table of ways to treat an optimizer's moments."""
    rows = [["", "trials", "C", "rollback", "rework", "median", "less than rollback", "versus restored"]]
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
            if "rare" in of and (key := name.strip()) in of:
                line, usual = (pick(of[study], "partial", EIGHTH, DEFAULT) for study in (key, "policies"))
                same = key != "policies" and interval == INTERVAL
                more = runs.versus(pair.name, (key, line.cell), ("policies", usual.cell)) if same else None
                first = [f"{pair.title}: {what}", str(of[key].trials), str(interval)]
                costs = [rework(pick(of[key], "rollback", ONE)), rework(line), f"{line.median:g}", less(line)]
                rows.append([*first, *costs, iterations(more) if more else "-"])
    return table(rows)


def curved(found: Summaries, runs: Runs) -> str:
    """Return the table of squared changes that are weighted by the optimizer's knowledge of curvature."""
    rows = [
        ["", "trials", "rework", "median", "less than rollback", "versus in turn", f"versus {DEFAULT}", "δ²"]
    ]
    for pair in PAIRS:
        of = found.get(pair.name, {})
        if "curved" not in of:
            continue
        line = pick(of["curved"], "partial", EIGHTH, DEFAULT)
        others = [pick(of["policies"], "partial", EIGHTH, policy) for policy in ("round", DEFAULT)]
        more = [runs.versus(pair.name, ("curved", line.cell), ("policies", other.cell)) for other in others]
        usual = pick(of["policies"], "partial", ONE).perturbation
        first = [pair.title, str(of["curved"].trials), rework(line), f"{line.median:g}", less(line)]
        rows.append([*first, *map(iterations, more), f"{(line.perturbation / usual) ** 2:.2f}"])
    return table(rows)


def sampled(found: Summaries, runs: Runs) -> str:
    """Ranking by fewer coordinates."""
    rows = [["", "trials", "coordinates", "rework", "median", "less than rollback", "versus all", "δ²"]]
    for pair in PAIRS:
        of = found.get(pair.name, {})
        if f"sampled-{SAMPLED[0]}" not in of:
            continue
        best = pick(of["policies"], "partial", EIGHTH, DEFAULT)
        names = {"policies": "all"} | {f"sampled-{every}": f"1 in {every}" for every in SAMPLED}
        for name, coordinates in names.items():
            line = pick(of[name], "partial", EIGHTH, DEFAULT)
            more = runs.versus(pair.name, (name, line.cell), ("policies", best.cell))
            change = f"{(line.perturbation / best.perturbation) ** 2:.2f}"
            first = [pair.title, str(of[name].trials), coordinates, rework(line), f"{line.median:g}"]
            rows.append([*first, less(line), "-" if name == "policies" else iterations(more), change])
    return table(rows)
