"""Measure the time per step of several ranks: without checkpoints, with scarctl, with DCP's async_save (equal bytes).

python benchmarks/ranks_step.py [--rounds 5] [--ranks 4] [--mb 200] [--interval 2] [--seconds 0.25] [--folder DIR]
python benchmarks/ranks_step.py --peers --ranks 2

Every rank has `--mb` MB of parameters and AdamW's moments, by FSDP2. scarctl saves 1/8 of the job's state every
`interval` steps, DCP all of it every 8 * interval: the same bytes per time. A step is `--seconds` of sleep, in which an
accelerator would work, the optimizer's step, and a wait for all ranks. Each arm runs 8 * interval steps, so one DCP
save or eight partial checkpoints, written in the background meanwhile. Arms take turns; what an arm still has to write
is waited for between arms, unmeasured.

  none                 no checkpoints
  scarctl              saved by the host's daemon, the default; the ranks choose together what to save
  DCP                  async_save with one DefaultStager for all saves, which keeps its memory
  DCP, async staging   the same, staged in a thread, which is waited for before the next optimizer step

With `--peers` each rank is a host of its own, with a daemon, and the arms are:

  none                 no checkpoints
  scarctl              peers=0: the same as above
  scarctl, peers=1     the other host keeps a copy of each host's memory

One line per arm, relative to the arm without checkpoints of the same round, medians over rounds: time per step as a
ratio, what the checkpoints of an arm cost in milliseconds in all, how much longer its worst step is than a usual one
without checkpoints; then milliseconds per step with the range, and bytes that all ranks saved per arm.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from ranked import build, latest, run, tensors, total, wait_durable
from timing import interleaved, parser, print_table, ratio, settle, spread
from torch import distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.daemon.client import ask_status

FULL = 8  # partial checkpoints per whole state


class Arm:
    """Runs steps and keeps their times."""

    nbytes = 0.0
    """Saved by the newest arm, on this rank."""

    def __init__(self, mb: float, steps: int, seconds: float) -> None:
        self.model, self.optimizer = build(mb)
        self.steps = steps
        self.seconds = seconds
        self.worst: list[float] = []
        self.usual: list[float] = []
        self.optimizer.step()

    def prepare(self) -> None:
        """Called before an arm, unmeasured."""

    def before(self, i: int) -> None:
        """Called at the beginning of step `i`."""

    def after(self, i: int) -> None:
        """Called before the optimizer's step `i`."""

    def finish(self) -> None:
        """Called after an arm, unmeasured."""

    def run(self) -> float:
        """Return the seconds per step, on average."""
        self.prepare()
        if dist.get_rank() == 0:
            settle()
        dist.barrier()
        times = []
        for i in range(self.steps):
            start = time.perf_counter()
            self.before(i)
            time.sleep(self.seconds)
            self.after(i)
            self.optimizer.step()
            dist.barrier()
            times.append(time.perf_counter() - start)
        self.worst.append(max(times))
        self.usual.append(statistics.median(times))
        self.finish()
        dist.barrier()
        return latest(statistics.fmean(times))


class Scarctl(Arm):
    """With a session."""

    def __init__(
        self,
        mb: float,
        steps: int,
        seconds: float,
        store: Path,
        arena_dir: str,
        interval: int,
        peers: int = 0,
    ) -> None:
        super().__init__(mb, steps, seconds)
        self.interval = interval
        self.arena_dir = arena_dir
        self.behind: list[int] = []
        """Iterations that the copy on the other host was behind, at the end of each arm."""
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            settings=scarctl.Settings(arena_dir=arena_dir, on_error="raise", peers=peers),
            fraction=1 / FULL,
            interval=interval,
        )
        self.optimizer.step()
        self.optimizer.step()
        wait_durable(self.session)
        self.stalls: list[float] = []

    def prepare(self) -> None:
        # The arm begins with a checkpoint, as DCP's does: its last one is then written inside the arm.
        while self.session.head_step % self.interval:
            self.optimizer.step()
        stats = self.session.stats
        self.marks = stats.stall_seconds, stats.saved_bytes, stats.checkpoints

    def finish(self) -> None:
        stats = self.session.stats
        self.stalls.append((stats.stall_seconds - self.marks[0]) / max(1, stats.checkpoints - self.marks[2]))
        self.nbytes = stats.saved_bytes - self.marks[1]
        self.behind += self.copies()
        self.optimizer.step()
        wait_durable(self.session)
        while self.copies() != [0] * len(self.copies()):
            time.sleep(0.02)

    def copies(self) -> list[int]:
        """Return by how many iterations each copy on another host is behind, -1 if it is not complete."""
        found = ask_status(host_folder(self.arena_dir), patience=30.0)
        runs = [] if found is None else found["runs"]
        said = [peer for run in runs if run["store"] == self.session.store.url for peer in run["peers"]]
        numbers = [re.search(r"(\d+) behind|up to date", peer) for peer in said]
        return [-1 if n is None else int(n[1] or 0) for n in numbers]


class Dcp(Arm):
    """DCP's async_save at the first step."""

    def __init__(self, mb: float, steps: int, seconds: float, path: Path, *, threaded: bool) -> None:
        super().__init__(mb, steps, seconds)
        self.path = path
        self.threaded = threaded
        self.stager = DefaultStager(StagingOptions(False, False, threaded, False))
        self.group = dist.new_group(backend="gloo")
        self.nbytes = sum(t.to_local().nbytes for _, t in tensors(self.model, self.optimizer))

    def before(self, i: int) -> None:
        if i == 0:
            self.saved: Any = dcp.async_save(
                dict(tensors(self.model, self.optimizer)),
                checkpoint_id=self.path,
                process_group=self.group,
                async_stager=self.stager,
            )

    def after(self, i: int) -> None:
        if i == 0 and self.threaded:
            self.saved.staging_completion.result()
            self.saved = self.saved.upload_completion

    def finish(self) -> None:
        self.saved.result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path)


def worker(args: Any) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    steps = FULL * args.interval
    folder = Path(args.work_folder)
    given = args.mb, steps, args.seconds
    home = Path(args.arena_dir, f"host-{dist.get_rank()}") if args.peers else Path(args.arena_dir)
    home.mkdir(exist_ok=True)
    arms: dict[str, Arm] = {
        "none": Arm(*given),
        "scarctl": Scarctl(*given, folder / "store", str(home), args.interval),
    }
    if args.peers:
        arms["scarctl, peers=1"] = Scarctl(*given, folder / "copied", str(home), args.interval, peers=1)
    else:
        arms["DCP"] = Dcp(*given, folder / "dcp", threaded=False)
        arms["DCP, async staging"] = Dcp(*given, folder / "dcp-threaded", threaded=True)
    cases: dict[str, Callable[[], float]] = {name: arm.run for name, arm in arms.items()}
    seconds = interleaved(cases, args.rounds)
    saved = {name: total(arm.nbytes) for name, arm in arms.items()}
    if dist.get_rank() == 0:
        report(seconds, arms, saved, steps)
    for name, arm in arms.items():
        if isinstance(arm, Scarctl):
            if dist.get_rank() == 0:
                behind = f"; iterations behind at an arm's end {arm.behind[1:]}" if arm.behind else ""
                print(
                    f"{name}: stall per checkpoint {spread(arm.stalls[1:], 1e-3, 0)} ms{behind}", flush=True
                )
            arm.session.close(seal=False)
    dist.barrier()
    found = ask_status(host_folder(str(home)), patience=30.0)
    if args.peers and found is not None:
        os.kill(found["pid"], signal.SIGTERM)
    dist.barrier()
    dist.destroy_process_group()


def report(
    seconds: dict[str, list[float]], arms: dict[str, Arm], saved: dict[str, float], steps: int
) -> None:
    """Print the table."""
    rows = []
    for name, taken in seconds.items():
        cost = statistics.median(t - b for t, b in zip(taken, seconds["none"], strict=True)) * steps
        usual = arms["none"].usual[1:]
        worst = [top - middle for top, middle in zip(arms[name].worst[1:], usual, strict=True)]
        rows.append(
            (
                name,
                f"{ratio(taken, seconds['none']):.3f}x",
                f"{cost * 1e3:.0f}",
                spread(worst, 1e-3, 0),
                spread(taken, 1e-3, 0),
                f"{saved[name] / 1e9:.2f}",
            )
        )
    print(f"{dist.get_world_size()} ranks, {steps} steps per arm")
    heads = ("checkpoints", "of none", "cost, ms", "worst step beyond, ms", "ms per step (range)", "GB")
    print_table(heads, rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--mb", type=float, default=200, help="of parameters and moments on every rank")
    options.add_argument("--peers", action="store_true", help="compare peers=1 with peers=0, a host per rank")
    options.add_argument("--interval", type=int, default=2)
    options.add_argument("--seconds", type=float, default=0.25, help="of work between two steps")
    run(options, __file__, worker)


if __name__ == "__main__":
    main()
