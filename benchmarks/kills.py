"""Kill README's loop with -9 after about 20 s, and measure how many of its iterations are trained again.

python benchmarks/kills.py [--kills 20] [--seconds 20] [--programs mlp,embeddings,small] [--folder DIR]

The programs are those of `killed.py`; "large" only if it is named. Each is killed in two ways of saving: scarctl with
default options, and torch.save of everything, as often as 1 % of the time allows. Both die at the same moments after
their first iteration, drawn between 0.9 and 1.1 times `--seconds`. Then the program is started again, and says where it
continues.

Results go into `build/kills.jsonl`, one line for each kill. What is there is not measured again, so a run that was
stopped continues: but only with the same sources and options. Measuring takes kills * 6 * (seconds + two starts).

First table, for each program and way: the iterations that are trained again, as a share of all until the kill: mean,
its 95 % interval by bootstrap, and the worst kill. Then the same by the loss: from that at which the run continues, by
the killed run's own history of losses, to the last one. A state of several iterations has a step number that says
little. Then the age of the state in seconds, means and the worst; the losses before the kill and after the resume; and
iterations until the kill, and checkpoints. Second table: the difference between both ways, paired by kill.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

from killing import Job, Results, isolated, options, resampled, worth
from timing import print_table

WAYS = {"scarctl": "scarctl", "save": "torch.save at 1 %"}
PROGRAMS = ("mlp", "embeddings", "small")
EVALUATE = 0.25
"""Seconds between two evaluations of the loss."""


def kill(args: argparse.Namespace, program: str, way: str, number: int) -> dict[str, Any]:
    """Train, kill, start again, and return what was lost."""
    after = args.seconds * random.Random(f"{args.seed} {program} {number}").uniform(0.9, 1.1)
    given = ["--program", program, "--way", way, "--threads", str(args.threads), "--evaluate", str(EVALUATE)]
    with isolated(args.folder) as (place, arenas):
        job = Job(place, arenas, given)
        board = job.board
        try:
            job.start()
            job.wait(lambda: board["head"] >= 1)
            first = board.time_of(1)
            time.sleep(max(0.0, first + after - time.monotonic()))
            if job.failed():
                raise RuntimeError(f"the job ended: {job.said()}")
            killed = job.kill()
            head, curve = int(board["head"]), board.curve()
            made, stall = board["saves"], board["stall"]
            job.start("--until", "0")
            job.wait(lambda: board["ended"] > killed)
            ready = board["ready"]
        finally:
            job.kill()
        resumed, loss = int(board["resumed"]), board["loss"]
    known = first if resumed < 1 else board.time_of(resumed)
    return {
        "head": head,
        "resumed": resumed,
        "whole": bool(board["whole"]),
        "share": max(0, head - resumed) / head,
        "by loss": max(0.0, head - min(worth(curve, loss), head)) / head,
        "age": killed - known,
        "loss before": curve[-1][1],
        "loss after": loss,
        "seconds": killed - first,
        "saves": made,
        "stall": stall,
        "back": ready - killed,
    }


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def with_interval(values: list[float]) -> str:
    """Return the mean and its 95 % interval, in percent."""
    low, high = resampled(values)
    return f"{percent(statistics.fmean(values))} ({percent(low)} to {percent(high)})"


def report(rows: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Print the tables."""
    lines, pairs = [], []
    for (program, way), found in rows.items():
        if not found:
            continue

        def of(name: str, found: list[dict[str, Any]] = found) -> list[float]:
            return [row[name] for row in found]

        means = {name: statistics.fmean(of(name)) for name in found[0] if name not in ("key", "time")}
        lines.append(
            (
                f"{program}, {WAYS[way]}",
                f"{len(found)}",
                with_interval(of("share")),
                percent(max(of("share"))),
                with_interval(of("by loss")),
                percent(max(of("by loss"))),
                f"{means['age']:.1f}, {max(of('age')):.1f}",
                f"{means['loss before']:.3f}, {means['loss after']:.3f}",
                f"{means['head']:.0f}",
                f"{means['saves']:.0f}",
                f"{sum(of('whole'))}",
            )
        )
        if way == "scarctl":
            continue
        both = list(zip(rows[program, "scarctl"], found, strict=False))
        for name, head in (("share", "by number"), ("by loss", "by loss")):
            gaps = [ours[name] - other[name] for ours, other in both]
            if gaps:
                better = sum(gap < 0 for gap in gaps)
                pairs.append((f"{program}, {head}", with_interval(gaps), f"{better} of {len(gaps)}"))
    heads = (
        "trained again, % of all until the kill",
        "kills",
        "mean (95 %)",
        "worst",
        "by loss (95 %)",
        "worst",
    )
    print_table((*heads, "age, s, worst", "loss before, after", "steps", "saves", "of one step"), lines)
    print()
    print_table(("scarctl less torch.save, percentage points", "mean (95 %)", "scarctl loses less in"), pairs)


def main() -> None:
    made = options(__doc__, "kills.jsonl")
    made.add_argument("--kills", type=int, default=20)
    made.add_argument("--seconds", type=float, default=20.0, help="of training before a kill, about")
    made.add_argument("--programs", default=",".join(PROGRAMS))
    args = made.parse_args()
    results = Results(args.results, args.again)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    programs = args.programs.split(",")
    # Kill by kill, so that a run that is stopped has all programs, and both ways at the same load.
    for number in range(args.kills):
        for program in programs:
            ways = list(WAYS) if number % 2 else list(reversed(WAYS))
            for way in ways:
                key = {"program": program, "way": way, "kill": number, "seed": args.seed}
                key |= {"of": args.seconds, "threads": args.threads, "version": args.version}
                row = results.get(key, lambda p=program, w=way, n=number: kill(args, p, w, n))  # type: ignore[misc]
                rows.setdefault((program, way), []).append(row)
    print(f"\n{os.cpu_count()} cores, load {results.load()}")
    report({(program, way): rows[program, way] for program in programs for way in WAYS})


if __name__ == "__main__":
    main()
