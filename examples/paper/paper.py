"""Measure the paper's figures and tables, and write docs/paper.md with its pictures.

python -m examples.paper.paper --data DIR
python -m examples.paper.paper --data DIR --quick --out build/paper-quick

Every trial is kept in a folder: the same call again continues where it was stopped, also with more --trials.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

from examples.paper import figures, options, perturb, tables
from examples.paper.chance import chances
from examples.paper.studies import PAIRS, PICTURE, Runs, pairs, studies
from examples.paper.timeline import FAILS_AFTER, Timeline, timeline
from scarctl.simulate.chart import draw as draw_priority
from scarctl.simulate.study import Study
from scarctl.simulate.summary import Summary

PERTURBED = 12
"""Perturbations of every kind in figures 5 and 6."""
HERE = Path(__file__).parent
GREY = figures.COLOURS[-1]


def main() -> None:
    """Measure what is not yet measured, then write."""
    arguments = _parse()
    torch.set_num_threads(1)  # sums in one order, as `scarctl simulate` has them
    out = arguments.out
    pictures = out / "paper"
    pictures.mkdir(parents=True, exist_ok=True)
    runs = Runs(arguments.results, None if arguments.kept else arguments.trials)
    found: dict[str, dict[str, tuple[Study, Summary]]] = {}
    for pair in pairs(quick=arguments.quick):
        found[pair.name] = {}
        for name, study in studies(pair, arguments.data, quick=arguments.quick).items():
            if summary := runs.measure(pair, name, study):
                found[pair.name][name] = study, summary
    points = 20 if arguments.quick else 1000
    costs = _perturbed(
        arguments.data, arguments.results, 3 if arguments.quick else PERTURBED, quick=arguments.quick
    )
    for name, picture in {
        "figure3": _scatter("Figure 3", perturb.quadratic(points)),
        "figure5": _scatter("Figure 5", costs[:2]),
        "figure6": _scatter("Figure 6", costs[2:]),
        "figure7": _lost({name: of["lost"][1] for name, of in found.items() if "lost" in of}),
        "figure9": _timeline(timeline(arguments.data, arguments.data)),
    }.items():
        (pictures / f"{name}.svg").write_text(picture, encoding="utf-8")
    for name, summaries in found.items():
        if PICTURE in summaries:
            picture = draw_priority(*summaries[PICTURE])
            (pictures / f"figure8-{name}.svg").write_text(picture, encoding="utf-8")
    summaries = {name: {key: summary for key, (_, summary) in of.items()} for name, of in found.items()}
    text = (
        (HERE / "template.md")
        .read_text(encoding="utf-8")
        .format(
            machine=options.machine(),
            trials=tables.trials(summaries),
            lost=tables.lost(summaries),
            priority=tables.priority(summaries),
            chance=chances(runs),
            other=tables.other(summaries, runs),
            aim=tables.aim(summaries),
            pictures="\n\n".join(
                f"![{name}](paper/figure8-{name}.svg)" for name in found if PICTURE in found[name]
            ),
            bounds="\n".join(f"- {_bound(cost)}" for cost in costs),
        )
    )
    (out / "paper.md").write_text(text, encoding="utf-8")
    print(f"{out / 'paper.md'}; {runs.seconds:.0f} s of processor time for new trials", file=sys.stderr)


def _perturbed(data: str, folder: Path, trials: int, *, quick: bool) -> list[perturb.Costs]:
    """Figures 5 and 6, measured once: kept next to the trials."""
    from examples.paper import lda, mlr

    source = hashlib.sha256(Path(perturb.__file__).read_bytes()).hexdigest()
    path = folder / f"perturbed-{trials}-{source[:8]}.json"
    if path.exists():
        return [perturb.Costs(**entry) for entry in json.loads(path.read_text())]
    steps = (5, 10, 20) if quick else (50, 100, 1000)
    costs = [*perturb.regression(mlr.build(data), trials, *steps), perturb.topics(lda.build(data), trials)]
    path.write_text(json.dumps([vars(cost) for cost in costs]))
    return costs


def _bound(cost: perturb.Costs) -> str:
    if not cost.bound:
        return f"{cost.title}: no bound, as the history does not say how fast the run converges"
    return f"{cost.title}: {100 * cost.above:.0f} % above the bound"


def _scatter(title: str, panels: list[perturb.Costs]) -> str:
    return figures.draw(
        title,
        [
            figures.Panel(
                costs.title,
                costs.size,
                "rework, iterations",
                [
                    figures.Series("measured", costs.points),
                    figures.Series(
                        "bound (6)",
                        costs.bound[:: len(costs.bound) // 100 + 1],
                        line=True,
                        colour=figures.COLOURS[1],
                    ),
                ],
                logarithmic=True,
            )
            for costs in panels
        ],
    )


def _lost(summaries: dict[str, Summary]) -> str:
    panels = []
    for name, summary in summaries.items():
        rollback, *partial = summary.cells
        shares = [float(line.cell.lost or 1) for line in partial]
        means = [line.rework.mean for line in partial]
        ends = [(line.rework.low, line.rework.high) for line in partial]
        level = [(0.0, rollback.rework.mean), (1.0, rollback.rework.mean)]
        title = next(pair.title for pair in PAIRS if pair.name == name)
        series = [
            figures.Series("partial", list(zip(shares, means, strict=True)), intervals=ends),
            figures.Series("full recovery", level, line=True, dashed=True, colour=GREY),
        ]
        ticks = dict(zip(shares, (str(line.cell.lost) for line in partial), strict=True))
        panels.append(figures.Panel(title, "lost", "rework, iterations", series, ticks=ticks))
    return figures.draw("Figure 7", panels)


def _timeline(found: Timeline) -> str:
    series = [
        figures.Series(
            "undisturbed", [(float(k), m) for k, m in enumerate(found.undisturbed, 1)], line=True, colour=GREY
        )
    ]
    for (name, points), colour in zip(found.ways.items(), figures.COLOURS, strict=False):
        label = f"{name}: {found.rework[name]:+d}"
        series.append(
            figures.Series(label, points, line=True, dashed=name.startswith("rollback"), colour=colour)
        )
    # The beginning, where the loss is large, would hide the rest.
    for each in series:
        each.points = [(x, y / 1e3) for x, y in each.points if x >= FAILS_AFTER - 2]
    lowest = min(y for each in series for _, y in each.points)
    for each in series:
        each.points = [(x, y - lowest) for x, y in each.points]
    up = f"likelihood, thousands above {lowest:.0f}"
    return figures.draw(
        "Figure 9", [figures.Panel("LDA: half is lost after iteration 7", "iterations done", up, series)]
    )


def _parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        name="paper",
        writes="paper.md and paper/",
        trials=tables.LEAST,
        of="of every row",
    )
    parser.add_argument("--data", default="../shared/data", help="folder with the folders of the data sets")
    return options.parse(parser)


if __name__ == "__main__":
    main()
