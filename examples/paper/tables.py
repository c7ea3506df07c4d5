"""Write the tables of docs/paper.md from the results of studies."""

from __future__ import annotations

from examples.paper.markdown import iterations, less, pick, rework, table, ways
from examples.paper.studies import EIGHTH, HALF, INTERVALS, ONE, PAIRS, PICTURE, QUARTER, Runs
from scarctl.simulate.summary import Summary

Summaries = dict[str, dict[str, Summary]]
PAPER_LOST = {1 - QUARTER: "12 to 42 %", HALF: "31 to 62 %", QUARTER: "59 to 89 %"}
AIM = 0.78
LEAST = 30
"""Trials that a row should have."""


def trials(found: Summaries) -> str:
    """Return how many trials the rows have."""
    few = []
    for name, of in found.items():
        counts = {key: summary.trials for key, summary in of.items() if key != PICTURE}
        if short := sorted({count for count in counts.values() if count < LEAST}):
            few.append(f"{_title(name)} ({' to '.join(map(str, [*short[:1], *short[1:][-1:]]))})")
    missing = [pair.title for pair in PAIRS if not found.get(pair.name)]
    text = f"Rows have {LEAST} trials"
    if few:
        text += f", with the exception of {', '.join(few)}"
    return text + (f". Not measured: {', '.join(missing)}" if missing else "")


def lost(found: Summaries) -> str:
    """Figure 7's numbers: how much less partial recovery costs."""
    rows = [
        ["", "trials", *(f"lost {share}" for share in PAPER_LOST)],
        ["paper", "100", *PAPER_LOST.values()],
    ]
    for name, of in found.items():
        if "lost" in of:
            shares = (less(pick(of["lost"], "partial", ONE, lost=share)) for share in PAPER_LOST)
            rows.append([_title(name), str(of["lost"].trials), *shares])
    return table(rows)


def priority(found: Summaries) -> str:
    """Figure 8's numbers: policies at an eighth, half lost."""
    return ways((_title(name), of["policies"]) for name, of in found.items() if "policies" in of)


def other(found: Summaries, runs: Runs) -> str:
    """Other norms, and saving only what the rest follows from, compared with plain SCAR in the same failures."""
    rows = [["", "trials", "rework", "less than rollback", "versus plain SCAR"]]
    for name, of in found.items():
        weight = "ratings" if name == "als" else "√exp_avg_sq"
        kinds = {
            "curved": f"squares weighted by {weight}",
            "only-r": "only R saved: L is recomputed",
            "resampled": "topics of lost documents redrawn once",
        }
        usual = pick(of["policies"], "partial", EIGHTH) if "policies" in of else None
        for key, what in kinds.items():
            if key in of and usual:
                line = pick(of[key], "partial", EIGHTH)
                more = iterations(runs.versus(name, (key, line.cell), ("policies", usual.cell)))
                rows.append([f"{_title(name)}: {what}", str(of[key].trials), rework(line), less(line), more])
    return table(rows)


def aim(found: Summaries) -> str:
    """List the pairs for which the paper's 78 % holds: priority 1/8 at loss 1/2, without choosing a way."""
    sides: dict[str, list[str]] = {"all of the interval": [], "a part of it": [], "nothing of it": []}
    above, some, none = sides.values()
    for name, of in found.items():
        for c in INTERVALS:
            reduction = (
                pick(of[f"interval-{c}"], "partial", EIGHTH).reduction if f"interval-{c}" in of else None
            )
            if reduction and reduction.low is not None and reduction.high is not None:
                side = above if reduction.low >= AIM else some if reduction.high >= AIM else none
                side.append(f"{_title(name)} at C = {c}")
    return "\n".join(f"- {text}: {', '.join(rows) or 'no pair'}" for text, rows in sides.items())


def _title(name: str) -> str:
    return next(pair.title for pair in PAIRS if pair.name == name)
