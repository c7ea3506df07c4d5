"""The tables of docs/paper.md, from what studies show."""

from __future__ import annotations

from examples.paper.markdown import less, percent, pick, table
from examples.paper.studies import EIGHTH, HALF, INTERVALS, ONE, PAIRS, QUARTER, Runs
from scarctl.simulate.intervals import Mean
from scarctl.simulate.summary import Summary

Summaries = dict[str, dict[str, Summary]]
PAPER_LOST = {1 - QUARTER: "12 to 42 %", HALF: "31 to 62 %", QUARTER: "59 to 89 %"}
PAPER_BEST = "78 to 95 %"
AIM = 0.78


def trials(found: Summaries) -> str:
    """How many of each pair."""
    counts = {name: sorted({summary.trials for summary in of.values()}) for name, of in found.items()}
    return ", ".join(
        f"{_title(name)} {' to '.join(map(str, [*ends[:1], *ends[1:][-1:]]))}"
        for name, ends in counts.items()
    )


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
    rows = [
        [
            "",
            "trials",
            "undisturbed",
            "rollback",
            "partial, all",
            "priority 1/8",
            "round 1/8",
            "random 1/8",
            "priority 1/8 costs less by",
        ]
    ]
    rows.append(["paper", "100", "about 60", "", "", "", "", "", PAPER_BEST])
    for name, of in found.items():
        if "priority" not in of:
            continue
        summary = of["priority"]
        best = pick(summary, "partial", EIGHTH)
        lines = [
            pick(summary, "rollback", ONE, lost=None), pick(summary, "partial", ONE), best,
            pick(summary, "partial", EIGHTH, policy="round"), pick(summary, "partial", EIGHTH, policy="random"),
        ]  # fmt: skip
        costs = [f"{line.rework.mean:.1f}{'+' if line.given_up else ''}" for line in lines]
        rows.append([_title(name), str(summary.trials), f"{summary.undisturbed:.0f}", *costs, less(best)])
    return table(rows)


def extrapolated(found: Summaries) -> str:
    """Extrapolating recovery beside plain: how much less than rollback, and its squared perturbation."""
    rows = [
        [
            "",
            "C",
            "trials",
            "all",
            "all, extrapolated",
            "priority 1/8",
            "priority 1/8, extrapolated",
            "δ² all",
            "δ² 1/8",
        ]
    ]
    for name, of in found.items():
        for c in INTERVALS:
            if f"interval-{c}" not in of:
                continue
            picked = {
                (mode, fraction): pick(of[f"interval-{c}"], mode, fraction)
                for fraction in (ONE, EIGHTH)
                for mode in ("partial", "extrapolate")
            }
            rows.append([_title(name), str(c), str(of[f"interval-{c}"].trials), *map(less, picked.values())])
            for fraction in (ONE, EIGHTH):
                plain, moved = (picked[mode, fraction].perturbation for mode in ("partial", "extrapolate"))
                rows[-1].append(f"{(moved / plain) ** 2:.2f}x" if plain else "")
    return table(rows)


def other(found: Summaries, runs: Runs) -> str:
    """Other norms, and saving only what the rest follows from."""
    rows = [["", "trials", "bytes per time", "priority 1/8, lost 1/2: costs less by"]]
    for name, of in found.items():
        weight = "ratings" if name == "als" else "√exp_avg_sq"
        # Plain SCAR as in figure 8: of as many trials, so mostly of the same failures.
        ways = {
            "priority": (f"{_title(name)}: plain SCAR", "1"),
            "curved": (f"the same, squares weighted by {weight}", "1"),
            "only-r": ("the same, only R saved: L is recomputed", "0.93"),
            "resampled": ("the same, topics of lost documents redrawn once", "1"),
        }
        for key, (what, nbytes) in ways.items():
            if key in of and ("curved" in of or "resampled" in of):
                rows.append([what, str(of[key].trials), nbytes, less(pick(of[key], "partial", EIGHTH))])
        if "only-l" in of:
            found_again = runs.beside(name, "only-l", "interval-8")
            what = "the same, only L saved, all in every iteration: R is recomputed"
            rows.append([what, str(of["only-l"].trials), "0.55", percent(found_again)])
    return table(rows)


def reached(found: Summaries, runs: Runs) -> str:
    """Which pairs come to the paper's 78 %, by what."""
    sentences = []
    for name, of in found.items():
        ways: dict[str, Mean | None] = {}
        for c in INTERVALS:
            for mode, what in (("partial", "plain"), ("extrapolate", "extrapolated")):
                if f"interval-{c}" in of:
                    ways[f"{what} at C = {c}"] = pick(of[f"interval-{c}"], mode, EIGHTH).reduction
        for key, what in (
            ("curved", "norm by curvature"),
            ("only-r", "only R saved"),
            ("resampled", "redrawn"),
        ):
            if key in of:
                ways[what] = pick(of[key], "partial", EIGHTH).reduction
        if "only-l" in of:
            ways["only L saved"] = runs.beside(name, "only-l", "interval-8")
        known = {way: mean for way, mean in ways.items() if mean}
        if not known:
            continue
        best = max(known, key=lambda way: known[way].mean)
        sure = [way for way, mean in known.items() if mean.low is not None and mean.low >= AIM]
        good = [way for way, mean in known.items() if mean.mean >= AIM and way not in sure]
        parts = [
            f"{text}: {', '.join(f'{way} {percent(known[way])}' for way in some)}"
            for text, some in (("with its whole interval", sure), ("in the mean", good))
            if some
        ]
        sentences.append(
            f"- {_title(name)}: " + ("; ".join(parts) or f"no; best is {best}, {percent(known[best])}")
        )
    return "\n".join(sentences)


def _title(name: str) -> str:
    return next(pair.title for pair in PAIRS if pair.name == name)
