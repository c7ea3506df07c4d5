"""Measure effective training time: processes are killed with -9 at random times, and come back in several ways.

python benchmarks/ettr.py [--mtbf 15] [--window 60] [--rounds 6] [--jobs one,rank,job] [--folder DIR]
python benchmarks/ettr.py --quick

The program is the MLP of `killed.py`, 30 MiB with AdamW's moments; `--sleep` stands in for an accelerator's work. The
jobs are one process; and four ranks under DistributedDataParallel with gloo of which one is killed ("rank"), or all
("job"). Times between kills are exponential with a mean of `--mtbf` seconds, and a kill may hit a restart. In a round
all ways get the same kills. When a rank dies the others get SIGTERM, as torchrun does, and all start again at once.

  none         no checkpoints
  torch.save   of everything, as often as 1 % of the time allows: measured, as in `kills.py`
  DCP          torch.distributed.checkpoint's async_save of everything, as often as its stall is 1 % of the time
  scarctl      default options

Effective time: useful time by wall time, from the first iteration until `--window` seconds later. Useful is the time
that an undisturbed run without saving needs to reach the same loss on the evaluation batch: the iteration at which it
has that loss, times its own seconds per iteration, measured in each round next to the ways. By number: the same with
the number of the iteration in place of the loss. A state of several iterations has a number that is too good.

A table for each job, means over rounds with 95 % intervals (Student's t): effective time by loss, by number; seconds
from a kill until the state is back; seconds of training that a kill costs, by loss; stall, of the time in which
training ran; e^(-R/M), which no way exceeds that needs R seconds to be back. Then the differences, paired by round, and
what was aimed at: scarctl is the best of those that run, and reaches 0.93 of e^(-R/M). Then effective times that Daly's
formula gives for other mean times between failures: from the measured stall, the age of the state at a kill and R; and
for torch.save at the best interval. The line "measured" is a check of that: a longer run, with `--check-mtbf`.

Results go into `build/ettr.jsonl`, as those of `kills.py` do: a run that was stopped continues.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from importlib import metadata
from typing import Any

from killing import BUILD, Job, Results, best_interval, daly, interval, isolated, options, version, worth
from timing import print_table

WAYS = {"none": "none", "save": "torch.save", "dcp": "DCP", "scarctl": "scarctl"}
JOBS = {"one": "one process", "rank": "one of {} ranks dies", "job": "all {} ranks die"}
GOAL = 0.93
MTBFS = (15, 30, 60, 120, 300, 600)
Row = dict[str, Any]


def kill_times(seed: str, mtbf: float, window: float, exactly: int | None = None) -> list[float]:
    """Return the times of kills, in seconds from the first iteration: exponential, or `exactly` so many."""
    draw, times = random.Random(seed), []
    if exactly is not None:
        return [window * (k + draw.uniform(0.35, 0.65)) / exactly for k in range(exactly)]
    at = draw.expovariate(1 / mtbf)
    while at < window:
        times.append(at)
        at += draw.expovariate(1 / mtbf)
    return times


def run(args: argparse.Namespace, kind: str, way: str, kills: list[float], window: float, seed: str) -> Row:
    """Train for a window with kills, and return what was achieved."""
    ranks = 1 if kind == "one" else args.ranks
    given = ["--way", way, "--sleep", str(args.sleep), "--threads", str(args.threads)]
    draw = random.Random(f"victims {seed}")
    back: list[float] = []
    lives: list[tuple[float, float, float]] = []
    down, started, head, failures = 0.0, None, 0.0, 0
    with isolated(args.folder) as (place, arenas):
        job = Job(place, arenas, given, ranks)
        board = job.board
        try:
            job.start()
            job.wait(lambda: board["head"] >= 1)
            first = board.time_of(1)
            for at in [*kills, window]:
                while time.monotonic() < first + at:
                    if started is not None and board["ready"] > started:
                        back.append(board["ready"] - started)
                        lives.append((head, board["resumed"], board["loss"]))
                        down, started = down + back[-1], None
                    if job.failed():  # a start that did not succeed, which a launcher tries again
                        failures += 1
                        if failures > 3:
                            raise RuntimeError(f"the job fails again and again: {job.said()}")
                        job.end()
                        job.start()
                    time.sleep(0.005)
                if at < window:
                    if started is None:
                        head = board["head"]
                    else:
                        down += time.monotonic() - started
                    started = job.kill(draw.randrange(ranks) if kind == "rank" else None)
                    job.start()
            board["stop"] = 1.0
            if started is not None:
                down += max(0.0, first + window - started)
            job.wait(lambda: board["ended"] > 0)
            if started is not None:  # back after the window: what was saved counts as the others' does
                back.append(board["ready"] - started)
                lives.append((head, board["resumed"], board["loss"]))
        finally:
            job.end(grace=0.0)
    trained = max(1e-9, window - down)
    return {
        "kills": len(kills),
        "step": board["end step"],
        "loss": board["end loss"],
        "back": back,
        "lives": lives,
        "down": down / window,
        "stall": board["stall"] / trained,
        "saves": board["saves"],
        "cost": board["stall"] / max(1.0, board["saves"]),
        "failures": failures,
        "whole": board["whole"],
    }


def undisturbed(args: argparse.Namespace, kind: str, window: float) -> Row:
    """Return the seconds per iteration without saves and kills."""
    row = run(args, kind, "none", [], window, "")
    return {"pace": window / (row["step"] - 1)}


def curve_of(args: argparse.Namespace, kind: str, steps: int) -> Row:
    """Return the losses of an undisturbed run without an accelerator's work, which they do not depend on."""
    given = ["--way", "none", "--threads", str(args.threads), "--every", "5", "--until", str(steps)]
    with isolated(args.folder) as (place, arenas):
        job = Job(place, arenas, given, 1 if kind == "one" else args.ranks)
        try:
            job.start()
            job.wait(lambda: job.board["ended"] > 0, timeout=3600)
        finally:
            job.end(grace=0.0)
        return {"curve": job.board.curve()}


class Point:
    """What a job achieves at one mean time between failures, by way."""

    def __init__(
        self, args: argparse.Namespace, results: Results, kind: str, mtbf: float, window: float
    ) -> None:
        self.kind, self.mtbf, self.window = kind, mtbf, window
        self._args, self._results = args, results
        self._curves = Results(BUILD / "ettr-curves.jsonl", again=False)
        self._curve: list[tuple[float, float]] = []
        self._key: Row = {"job": kind, "threads": args.threads, "sleep": args.sleep, "version": args.version}
        if kind != "one":
            self._key["ranks"] = args.ranks
        self.rows: dict[str, list[Row]] = {}
        self.paces: list[float] = []

    def measure(self, number: int, ways: list[str]) -> None:
        """Run a round: the undisturbed run, and all ways with the same kills."""
        key = self._key | {"mtbf": self.mtbf, "window": self.window, "seed": self._args.seed}
        key |= {"round": number, "kills": self._args.kills}
        seed = f"{self._args.seed} {self.kind} {self.mtbf} {number}"
        kills = kill_times(seed, self.mtbf, self.window, self._args.kills)
        shift = number % (len(ways) + 1)
        order = ["undisturbed", *ways]
        for way in order[shift:] + order[:shift]:
            if way == "undisturbed":
                short = min(self.window / 2, 20.0)
                row = self._results.get(
                    {**key, "way": way},
                    lambda s=short: undisturbed(self._args, self.kind, s),  # type: ignore[misc]
                )
                self.paces.append(row["pace"])
            else:
                row = self._results.get(
                    {**key, "way": way},
                    lambda w=way: run(self._args, self.kind, w, kills, self.window, seed),  # type: ignore[misc]
                )
                self.rows.setdefault(way, []).append(row)

    def curve(self) -> list[tuple[float, float]]:
        """Return the losses of an undisturbed run, by iteration, as far as any way came."""
        if not self._curve:
            steps = 250
            while steps <= max(row["step"] for rows in self.rows.values() for row in rows):
                steps *= 2
            key = {"job": self.kind, "threads": self._args.threads, "curve": steps}
            key |= {"ranks": 1 if self.kind == "one" else self._args.ranks}
            key |= {"torch": metadata.version("torch"), "version": version(product=False)}
            self._curve = self._curves.get(key, lambda: curve_of(self._args, self.kind, steps))["curve"]
        return self._curve

    def effective(self) -> dict[str, dict[str, list[float]]]:
        """Return effective times of all rounds: "loss" and "number", by way."""
        found: dict[str, dict[str, list[float]]] = {}
        for way, rows in self.rows.items():
            paced = list(zip(rows, self.paces, strict=True))
            achieved = [worth(self.curve(), row["loss"]) for row in rows]
            found[way] = {
                "loss": [
                    max(0.0, n - 1) * p / self.window for n, p in zip(achieved, self.paces, strict=True)
                ],
                "number": [max(0.0, row["step"] - 1) * pace / self.window for row, pace in paced],
            }
        return found

    def back(self, way: str) -> float:
        """Return the median seconds from a kill until the state is back, NaN without kills."""
        return float(statistics.median([b for row in self.rows[way] for b in row["back"]] or [math.nan]))

    def age(self, way: str) -> float:
        """Return the mean seconds of training, by the loss, that a kill costs."""
        lost = []
        for row, pace in zip(self.rows[way], self.paces, strict=True):
            before, resumed = 0.0, 0.0
            for head, at, loss in row["lives"]:
                then = worth(self.curve(), loss)
                lost.append(max(0.0, before + head - resumed - then) * pace)
                before, resumed = then, at
        return statistics.fmean(lost or [math.nan])

    def mean(self, way: str, name: str) -> float:
        return statistics.fmean(row[name] for row in self.rows[way])

    def predicted(self, way: str, mtbf: float) -> float:
        """Return the effective time by Daly: saves are twice as far apart as the state is old at a kill."""
        every = 2 * self.age(way)
        return daly(every, every * self.mean(way, "stall"), self.back(way), mtbf)


def with_interval(values: list[float], digits: int = 3) -> str:
    """Return the mean and its 95 % interval."""
    low, high = interval(values)
    middle = f"{statistics.fmean(values):.{digits}f}"
    return f"{middle} ({low:.{digits}f} to {high:.{digits}f})" if len(values) > 1 else f"{middle} (n=1)"


def report(point: Point, ranks: int) -> None:
    """Print what a job achieves, and whether it is what was aimed at."""
    found = point.effective()
    title = JOBS[point.kind].format(ranks)
    rounds = len(point.paces)
    kills = point.mean(next(iter(point.rows)), "kills")
    pace = 1e3 * statistics.fmean(point.paces)
    print(
        f"\n{title}: MTBF {point.mtbf:g} s, {rounds} rounds of {point.window:g} s with {kills:.1f} kills,",
        end=" ",
    )
    print(f"{pace:.0f} ms per iteration if undisturbed")
    lines = [
        (
            WAYS[way],
            with_interval(found[way]["loss"]),
            with_interval(found[way]["number"]),
            f"{point.back(way):.2f}",
            f"{point.age(way):.2f}",
            f"{100 * point.mean(way, 'stall'):.2f}",
            f"{math.exp(-point.back(way) / point.mtbf):.3f}",
            f"{1 - point.mean(way, 'down'):.3f}",
        )
        for way in point.rows
    ]
    heads = ("way", "effective, by loss (95 %)", "by number (95 %)", "back, s", "lost a kill, s", "stall, %")
    print_table((*heads, "e^(-R/M)", "time not in restarts"), lines)
    if "scarctl" in point.rows:
        aims(point, found)


def aims(point: Point, found: dict[str, dict[str, list[float]]]) -> None:
    """Print the differences, and whether the goals are met."""
    ours, lines, verdicts = found["scarctl"]["loss"], [], []
    for way in point.rows:
        if way != "scarctl":
            gaps = [a - b for a, b in zip(ours, found[way]["loss"], strict=True)]
            low, high = interval(gaps)
            verdicts.append("better" if low > 0 else "worse" if high < 0 else "not decided")
            lines.append((f"scarctl less {WAYS[way]}", with_interval(gaps), verdicts[-1]))
    print_table(("by loss, paired by round", "difference (95 %)", "scarctl is"), lines)
    best = "met" if set(verdicts) == {"better"} else "missed" if "worse" in verdicts else "not decided"
    print(f"goal: the best of those that run: {best}")
    ceiling = math.exp(-point.back("scarctl") / point.mtbf)
    if math.isnan(ceiling):
        print(f"goal: {GOAL} of e^(-R/M): not measured, nothing was killed")
        return
    reached = [value / ceiling for value in ours]
    low, high = interval(reached)
    met = "met" if statistics.fmean(reached) >= GOAL else "missed"
    sure = "" if low >= GOAL or high < GOAL else ", not beyond the noise"
    print(f"goal: {GOAL} of e^(-R/M) = {ceiling:.3f}: {with_interval(reached)}: {met}{sure}")
    up = [value / (1 - row["down"]) for value, row in zip(ours, point.rows["scarctl"], strict=True)]
    print(f"of the time in which scarctl's own job was not restarting: {with_interval(up)}")


def extrapolate(point: Point, check: Point | None) -> None:
    """Print what Daly's formula gives at other mean times between failures, and the check."""
    lines = []
    ways = [way for way in point.rows if way != "none" and not math.isnan(point.age(way))]
    for way in ways:
        lines.append((WAYS[way], *(f"{point.predicted(way, mtbf):.3f}" for mtbf in MTBFS)))
    if "save" in ways:
        cost, back = point.mean("save", "cost"), point.back("save")
        best = [best_interval(cost, back, mtbf) for mtbf in MTBFS]
        cells = [f"{daly(k, cost, back, mtbf):.3f} at {k:.1f} s" for k, mtbf in zip(best, MTBFS, strict=True)]
        lines.append(("torch.save at its best interval", *cells))
    print("\nby Daly's formula, from the stall, what a kill costs, and the restart above")
    print_table(("mean time between failures, s", *(str(mtbf) for mtbf in MTBFS)), lines)
    if check is not None:
        found = check.effective()
        lines = [
            (
                f"{WAYS[way]}, MTBF {check.mtbf:g} s, {sum(row['kills'] for row in check.rows[way])} kills",
                f"{point.predicted(way, check.mtbf):.3f}",
                with_interval(found[way]["loss"]),
                with_interval(found[way]["number"]),
            )
            for way in check.rows
            if way in ways
        ]
        print_table(("check", "by Daly", "measured, by loss", "by number"), lines)


def main() -> None:
    made = options(__doc__, "ettr.jsonl")
    made.add_argument(
        "--quick", action="store_true", help="about a minute: one process, few kills, one round"
    )
    made.add_argument("--mtbf", type=float, default=15.0, help="mean seconds between kills")
    made.add_argument("--kills", type=int, help="exactly so many in a window, one in each part of it")
    made.add_argument("--window", type=float, default=60.0, help="seconds of each run")
    made.add_argument("--rounds", type=int, default=6, help="of all ways, each with kills of its own")
    made.add_argument("--jobs", default=",".join(JOBS))
    made.add_argument("--ways", default=",".join(WAYS))
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--sleep", type=float, default=0.03, help="seconds of each iteration")
    made.add_argument(
        "--check-mtbf", type=float, default=60.0, help="of the check of Daly's formula; 0: none"
    )
    made.add_argument("--check-window", type=float, default=240.0)
    made.add_argument("--check-rounds", type=int, default=2)
    args = made.parse_args()
    if args.quick:
        args.jobs, args.ways, args.rounds, args.check_mtbf = "one", "save,scarctl", 1, 0.0
        args.window, args.kills, args.again, args.results = 16.0, 1, True, BUILD / "ettr-quick.jsonl"
    if args.kills is not None:
        args.mtbf = args.window / max(1, args.kills)
    results = Results(args.results, args.again)
    kinds, ways = args.jobs.split(","), args.ways.split(",")
    points = {kind: Point(args, results, kind, args.mtbf, args.window) for kind in kinds}
    for number in range(args.rounds):
        for point in points.values():
            point.measure(number, ways)
    check = None
    if args.check_mtbf and "one" in points:
        check = Point(args, results, "one", args.check_mtbf, args.check_window)
        for number in range(args.check_rounds):
            check.measure(number, [way for way in ways if way in ("save", "scarctl")])
    for kind, point in points.items():
        report(point, args.ranks)
        extrapolate(point, check if kind == "one" else None)
    print(f"\n{os.cpu_count()} cores, load {results.load()}")


if __name__ == "__main__":
    main()
