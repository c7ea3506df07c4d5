"""`scarctl simulate`: measure the cost of losing a part of a workload's state, by policy, fraction and recovery."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.output import EXIT_OK, emit, note, output_options, warn
from scarctl.cli.progress import Progress
from scarctl.errors import UsageError
from scarctl.util.text import aligned, counted

if TYPE_CHECKING:
    from scarctl.simulate.intervals import Mean
    from scarctl.simulate.summary import Summary

EXAMPLES = """\b
Examples:
  scarctl simulate workload:build --interval 16 --results study.jsonl
  scarctl simulate workload:build --policy priority --fraction 1/8 --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("workload")
@click.option("--data", metavar="DIR", help="Folder for the workload's factory.")
@click.option(
    "--lost", default="1/2", show_default=True, metavar="SHARES", help="Shares that a failure loses."
)
@click.option(
    "--fraction",
    default="1,1/2,1/4,1/8",
    show_default=True,
    metavar="SHARES",
    help="Shares that one checkpoint saves; 1/8: eight times as often.",
)
@click.option(
    "--policy",
    default="aged,priority,round,random",
    show_default=True,
    metavar="NAMES",
    help="How a share is chosen.",
)
@click.option(
    "--mode", default="partial,rollback", show_default=True, metavar="NAMES", help="Ways to recover."
)
@click.option(
    "--interval",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="C",
    help="Iterations between full checkpoints.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Number of runs that fail.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of all random choices.",
)
@click.option(
    "--failure-rate",
    type=float,
    metavar="P",
    help="Probability of a failure per iteration, instead of equally likely ones.",
)
@click.option(
    "--fail-after", type=click.IntRange(min=1), metavar="N", help="Fail after iteration N, not a random one."
)
@click.option(
    "--stratify", is_flag=True, help="Spread failures evenly over the time since a full checkpoint."
)
@click.option(
    "--smooth",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Iterations over which the metric is averaged, so that no lucky one ends a run.",
)
@click.option(
    "--iterations", type=click.IntRange(min=2), metavar="N", help="Length of a run, if not the workload's."
)
@click.option("--target", type=float, metavar="X", help="Metric to reach, if not the workload's.")
@click.option("--norm", metavar="NAME", help="l2, rms or relative, if not the workload's.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes.  [default: all cores]")
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File that keeps all trials: the same command continues.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Picture: .svg, or .png with the extra `png`.",
)
@click.option("--predictions", is_flag=True, help="Compare with what a session would have predicted.")
@output_options
def command(
    workload: str,
    data: str | None,
    lost: str,
    fraction: str,
    policy: str,
    mode: str,
    trials: int,
    jobs: int | None,
    results: Path | None,
    plot: Path | None,
    predictions: bool,
    **of_study: Any,
) -> int:
    """Fail runs of WORKLOAD, and show how many iterations each failure costs.

    WORKLOAD is module:factory, which makes a scarctl.simulate.Workload. Every trial fails one run, and continues it
    once for each combination. Rework: additional iterations until the metric is as low.
    """
    from scarctl.simulate.results import Results
    from scarctl.simulate.study import Study, parse_share
    from scarctl.simulate.summary import summarise
    from scarctl.simulate.workers import Workers

    study = Study(
        workload=workload,
        data=None if data is None else str(Path(data).expanduser()),
        lost=tuple(map(parse_share, _items(lost))),
        fractions=tuple(map(parse_share, _items(fraction))),
        policies=tuple(_items(policy)),
        modes=tuple(_items(mode)),
        **of_study,
    )
    if plot is not None:
        _check_plot(plot)
    with Workers(study, min(trials, jobs or _cores())) as workers:
        kept = Results(results, {**study.to_json(), "source": workers.source})
        try:
            missing = [trial for trial in range(trials) if trial not in kept.by_trial]
            if results is not None and len(missing) < trials:
                note(f"{trials - len(missing)} of {counted(trials, 'trial')} already in {results}")
            progress = Progress("trials: finished", str)
            for number, result in enumerate(workers.run(missing), trials - len(missing) + 1):
                kept.add(result)
                progress(number, trials)
        finally:
            kept.close()
    chosen = [kept.by_trial[trial] for trial in range(trials)]
    summary = summarise(study, chosen)
    if summary.irreproducible:
        warn(
            f"in {summary.irreproducible} of {counted(trials, 'trial')} the same seed gave a different run: part of "
            "the differences shown comes from that"
        )
    if plot is not None:
        from scarctl.simulate.chart import draw

        _write(plot, draw(study, summary))
    fields = {"study": study.to_json(), **summary.to_json(), "plot": None if plot is None else str(plot)}
    text = _text(summary)
    if predictions:
        from scarctl.simulate.calibration import compare

        comparison = compare(study, chosen)
        fields["predictions"] = comparison.to_json()
        text += "\n\n" + "\n".join(comparison.text())
    emit(fields, text=text)
    return EXIT_OK


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _items(text: str) -> list[str]:
    return [item for item in (piece.strip() for piece in text.split(",")) if item]


def _check_plot(path: Path) -> None:
    """Raise UsageError if the picture cannot be written, before hours of trials."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"{path}: a picture is SVG or PNG", hint="give a name that ends in .svg or .png")
    if path.suffix.lower() == ".png":
        from scarctl.simulate.png import check

        check()
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: its folder does not exist", hint="create it first")


def _write(path: Path, picture: str) -> None:
    content = picture.encode()
    if path.suffix.lower() == ".png":
        from scarctl.simulate.png import render

        content = render(picture)
    from scarctl.formats.state_file import os_errors

    with os_errors(path):
        path.write_bytes(content)


def _text(summary: Summary) -> str:
    columns = (
        "way",
        "saves",
        "lost",
        "rework",
        "95 % interval",
        "median",
        "less than rollback",
        "versus round",
        "perturbation",
        "oldest copy",
    )
    rows = [columns]
    for line in summary.cells:
        cell = line.cell
        rows.append(
            (
                cell.mode,
                f"{cell.policy} {cell.fraction}" if cell.fraction != 1 else "all",
                "-" if cell.lost is None else str(cell.lost),
                f"{line.rework.mean:.2f}{'+' if line.given_up else ''}",
                _interval(line.rework, 1),
                f"{line.median:g}",
                "-"
                if line.reduction is None
                else f"{line.reduction.mean:.0%} {_interval(line.reduction, 100)}".strip(),
                "-"
                if line.versus_round is None
                else f"{line.versus_round.mean:+.2f} {_interval(line.versus_round, 1)}".strip(),
                f"{line.perturbation:.4g}",
                _oldest(line.oldest),
            )
        )
    lines = aligned(rows)
    lines.append(
        f"{counted(summary.trials, 'trial')}; undisturbed, a run takes {summary.undisturbed:.1f} iterations"
    )
    lost = sum(line.given_up for line in summary.cells)
    if lost:
        lines.append(
            f"+: {counted(lost, 'run')} never reached the target: counted with the iterations until the stop"
        )
    return "\n".join(lines)


def _oldest(ages: dict[str, float] | None) -> str:
    """Return the age of the oldest copy, and its parameter if there are several."""
    if not ages:
        return "-"
    name = max(ages, key=ages.__getitem__)
    return f"{ages[name]:.0f}" + (f" ({name})" if len(ages) > 1 else "")


def _interval(mean: Mean, scale: int) -> str:
    if mean.low is None or mean.high is None:
        return ""
    digits = 2 if scale == 1 else 0
    return f"({scale * mean.low:.{digits}f} to {scale * mean.high:.{digits}f})"
