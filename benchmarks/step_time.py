"""Measure the time per training step: without checkpoints, with scarctl, and with async_save of DCP at equal bytes.

python benchmarks/step_time.py [--rounds 5] [--interval 4] [--work sleep|compute|both] [--seconds 0.25] [--folder DIR]

The state is that of GPT-2 small with AdamW: 1.49 GB. scarctl saves 1/8 of it every `interval` steps, DCP all of it
every 8 * interval: the same bytes per time. Each arm runs 8 * interval steps of AdamW with `--work` between them
(sleep: an accelerator has the forward and backward; compute: this machine's cores have), so one DCP save or eight
partial checkpoints, written in the background meanwhile. Arms take turns; what an arm still has to write is waited for
between arms, unmeasured.

  none                 no checkpoints
  scarctl, daemon      saved by the host's daemon, the default
  scarctl, thread      saved by a thread of the training process
  DCP, thread          async_save with one DefaultStager for all saves, which keeps its memory
  DCP, process         async_save that writes from another process; staged in shared memory, in a thread, which is
                       waited for before the next optimizer step: its mode with the least stall

One line per arm, relative to the arm without checkpoints of the same round, medians over rounds: time per step as a
ratio, what the checkpoints of an arm cost in milliseconds in all, how much longer its worst step is than a usual one
without checkpoints; then milliseconds per step with the range, and bytes saved per arm.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from timing import arenas, interleaved, parser, print_table, ratio, scratch, settle, spread
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from training import build, tensors, wait_durable, whole_state, work

import scarctl

FULL = 8  # partial checkpoints per whole state
Work = Callable[[], None]


class Arm:
    """Runs steps and keeps their times. `before` is called before a step's work, `after` right after it."""

    nbytes = 0

    def __init__(self, optimizer: Any, steps: int) -> None:
        self.optimizer = optimizer
        self.steps = steps
        self.slowest: list[float] = []
        self.usual: list[float] = []

    def before(self, i: int) -> None:
        """Called at the beginning of step `i`."""

    def after(self, i: int) -> None:
        """Called before the optimizer's step `i`."""

    def prepare(self) -> None:
        """Called before an arm, unmeasured."""

    def finish(self) -> None:
        """Called after an arm, unmeasured."""

    def run(self, work: Work) -> float:
        """Return the seconds per step, on average."""
        self.prepare()
        settle()
        times = []
        for i in range(self.steps):
            start = time.perf_counter()
            self.before(i)
            work()
            self.after(i)
            self.optimizer.step()
            times.append(time.perf_counter() - start)
        self.slowest.append(max(times))
        self.usual.append(statistics.median(times))
        self.finish()
        return statistics.fmean(times)


class Scarctl(Arm):
    """A session attached to a training run of its own."""

    def __init__(self, folder: Path, arena_dir: str, scale: int, interval: int, *, daemon: bool) -> None:
        self.model, optimizer = build(scale)
        super().__init__(optimizer, FULL * interval)
        os.environ["SCARCTL_DAEMON"] = str(int(daemon))
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=folder / f"store-{daemon}",
            fraction=1 / FULL,
            interval=interval,
            settings=scarctl.Settings(on_error="raise", arena_dir=arena_dir),
        )
        self.interval = interval
        optimizer.step()
        optimizer.step()
        wait_durable(self.session, 1)
        self.stalls: list[float] = []

    def prepare(self) -> None:
        # The arm begins with a checkpoint, as DCP's does: its last one is then written inside the arm.
        while self.session.head_step % self.interval:
            self.optimizer.step()
        stats = self.session.stats
        self.marks = stats.stall_seconds, stats.saved_bytes, stats.checkpoints

    def finish(self) -> None:
        stats = self.session.stats
        count = stats.checkpoints - self.marks[2]
        self.stalls.append((stats.stall_seconds - self.marks[0]) / max(1, count))
        self.nbytes = stats.saved_bytes - self.marks[1]
        self.optimizer.step()
        head = self.session.head_step - 1
        wait_durable(self.session, head - head % self.interval)


class Dcp(Arm):
    """DCP's async_save at the first step."""

    def __init__(self, model: Any, optimizer: Any, steps: int, path: Path, *, process: bool) -> None:
        super().__init__(optimizer, steps)
        self.model = model
        self.path = path
        self.kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self.process = process
        self.stager = DefaultStager(StagingOptions(False, process, process, False))
        self.nbytes = sum(t.nbytes for _, t in tensors(model, optimizer))

    def before(self, i: int) -> None:
        if i == 0:
            self.saved: Any = dcp.async_save(
                whole_state(self.model, self.optimizer),
                checkpoint_id=self.path,
                async_checkpointer_type=self.kind,
                async_stager=self.stager,
                no_dist=not self.process,
            )

    def after(self, i: int) -> None:
        if i == 0 and self.process:
            self.saved.staging_completion.result()
            self.saved = self.saved.upload_completion

    def finish(self) -> None:
        self.saved.result()
        shutil.rmtree(self.path)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--interval", type=int, default=4)
    options.add_argument("--work", choices=("sleep", "compute", "both"), default="both")
    options.add_argument("--seconds", type=float, default=0.25, help="of work between two steps")
    options.add_argument("--scale", type=int, default=1, help="divide the state's size by this")
    args = options.parse_args()
    # DCP warns that it runs alone and that it overwrites: both are meant.
    warnings.simplefilter("ignore")
    kinds = ("sleep", "compute") if args.work == "both" else (args.work,)
    works = {kind: work(kind, args.seconds) for kind in kinds}
    # The process-based saver has no mode without a process group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with scratch(args.folder) as folder, arenas(folder) as arena_dir:
        model, optimizer = build(args.scale)
        optimizer.step()
        steps = FULL * args.interval
        arms = {
            "none": Arm(optimizer, steps),
            "scarctl, daemon": Scarctl(folder, arena_dir, args.scale, args.interval, daemon=True),
            "scarctl, thread": Scarctl(folder, arena_dir, args.scale, args.interval, daemon=False),
            "DCP, thread": Dcp(model, optimizer, steps, folder / "dcp-thread", process=False),
            "DCP, process": Dcp(model, optimizer, steps, folder / "dcp-process", process=True),
        }
        runs: dict[str, Arm] = {}
        cases: dict[str, Callable[[], float]] = {}
        for kind in kinds:
            for name, arm in arms.items():
                cases[f"{kind}: {name}"] = lambda arm=arm, kind=kind: arm.run(works[kind])  # type: ignore[misc]
                runs[f"{kind}: {name}"] = arm
        # One arm serves every kind of work: its extremes are taken apart by their order.
        extremes: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        seconds = interleaved(
            {name: _noting(call, runs[name], extremes[name]) for name, call in cases.items()}, args.rounds
        )
        for name in ("scarctl, daemon", "scarctl, thread"):
            arm = arms[name]
            assert isinstance(arm, Scarctl)
            print(f"{name}: stall per checkpoint {spread(arm.stalls[1:], 1e-3, 0)} ms")
            arm.session.close(seal=False)
    dist.destroy_process_group()
    rows = []
    for name, taken in seconds.items():
        base = f"{name.split(': ')[0]}: none"
        cost = statistics.median(t - b for t, b in zip(taken, seconds[base], strict=True)) * steps
        worst = [
            top - usual for (top, _), (_, usual) in zip(extremes[name][1:], extremes[base][1:], strict=True)
        ]
        rows.append(
            (
                name,
                f"{ratio(taken, seconds[base]):.3f}x",
                f"{cost * 1e3:.0f}",
                spread(worst, 1e-3, 0),
                spread(taken, 1e-3, 0),
                f"{runs[name].nbytes / 1e9:.2f}",
            )
        )
    print(f"{steps} steps per arm")
    heads = ("work: checkpoints", "of none", "cost, ms", "worst step beyond, ms", "ms per step (range)", "GB")
    print_table(heads, rows)


def _noting(call: Callable[[], float], arm: Arm, into: list[tuple[float, float]]) -> Callable[[], float]:
    def noted() -> float:
        taken = call()
        into.append((arm.slowest[-1], arm.usual[-1]))
        return taken

    return noted


if __name__ == "__main__":
    main()
