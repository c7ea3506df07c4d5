"""Time per training step: without checkpoints, with scarctl, and with DCP's async_save at equal bytes per time.

python benchmarks/step_time.py [--rounds 5] [--interval 5] [--work sleep|compute|both] [--seconds 0.3] [--folder DIR]

The state is that of GPT-2 small with AdamW: 1.49 GB. scarctl saves 1/8 of it every `interval` steps, DCP all of it
every 8 * interval: the same bytes per time. Each arm runs 8 * interval steps of AdamW with `--work` between them
(sleep: an accelerator has the forward and backward; compute: this machine's cores have), so one DCP save or eight
partial checkpoints, written in the background meanwhile. Arms take turns; what an arm still has to write is waited for
between arms, unmeasured.

One line per arm: time per step relative to the arm without checkpoints of the same round, the median in
milliseconds with the range, the slowest step, bytes given to the disk in the arm, and (scarctl) stall per checkpoint.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp
from timing import interleaved, parser, print_table, ratio, scratch, settle, spread
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from training import build, tensors, wait_durable, whole_state, work

import scarctl

FULL = 8  # partial checkpoints per whole state


class Arm:
    """Runs steps and keeps their times."""

    def __init__(self, optimizer: Any, steps: int) -> None:
        self.optimizer = optimizer
        self.steps = steps
        self.slowest: list[float] = []

    def run(self, work: Callable[[], None], before: Callable[[int], None] = lambda _: None) -> float:
        """Seconds per step, on average; `before` is called before each step's work."""
        settle()
        times = []
        for i in range(self.steps):
            start = time.perf_counter()
            before(i)
            work()
            self.optimizer.step()
            times.append(time.perf_counter() - start)
        self.slowest.append(max(times))
        return statistics.fmean(times)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--interval", type=int, default=5)
    options.add_argument("--work", choices=("sleep", "compute", "both"), default="both")
    options.add_argument("--seconds", type=float, default=0.3, help="of work between two steps")
    options.add_argument("--scale", type=int, default=1, help="divide the state's size by this")
    args = options.parse_args()
    # DCP warns that it runs alone and that it overwrites: both are meant.
    warnings.simplefilter("ignore")
    kinds = ("sleep", "compute") if args.work == "both" else (args.work,)
    works = {kind: work(kind, args.seconds) for kind in kinds}
    with scratch(args.folder) as folder:
        plain_model, plain = build(args.scale)
        saved_model, saved = build(args.scale)
        session = scarctl.attach(
            saved_model,
            saved,
            store=folder / "store",
            fraction=1 / FULL,
            interval=args.interval,
            on_error="raise",
        )
        steps = FULL * args.interval
        stager = DefaultStager(StagingOptions(False, False, False, False))
        for optimizer in (plain, saved):
            optimizer.step()
            optimizer.step()
        wait_durable(session, 1)
        nbytes = sum(t.nbytes for _, t in tensors(plain_model, plain))
        stalls: list[float] = []
        written: list[int] = []
        arms: dict[str, Arm] = {}

        def without(kind: str) -> float:
            return arms[f"{kind}: none"].run(works[kind])

        def with_scarctl(kind: str) -> float:
            # The arm begins with a checkpoint, as DCP's does: its last one is then written inside the arm.
            while session.head_step % args.interval:
                saved.step()
            before = session.stats.stall_seconds, session.stats.saved_bytes, session.stats.checkpoints
            taken = arms[f"{kind}: scarctl"].run(works[kind])
            count = session.stats.checkpoints - before[2]
            stalls.append((session.stats.stall_seconds - before[0]) / max(1, count))
            written.append(session.stats.saved_bytes - before[1])
            saved.step()
            wait_durable(session, session.head_step - 1 - (session.head_step - 1) % args.interval)
            return taken

        def with_dcp(kind: str) -> float:
            futures: list[Any] = []

            def save(i: int) -> None:
                if i == 0:
                    state = whole_state(plain_model, plain)
                    futures.append(
                        dcp.async_save(state, checkpoint_id=folder / "dcp", no_dist=True, async_stager=stager)
                    )

            taken = arms[f"{kind}: DCP async_save"].run(works[kind], save)
            futures[0].result()
            return taken

        cases = {}
        for kind in kinds:
            for name, run, optimizer in (
                ("none", without, plain),
                ("scarctl", with_scarctl, saved),
                ("DCP async_save", with_dcp, plain),
            ):
                arms[f"{kind}: {name}"] = Arm(optimizer, steps)
                cases[f"{kind}: {name}"] = lambda run=run, kind=kind: run(kind)  # type: ignore[misc]
        seconds = interleaved(cases, args.rounds)
        session.close()
    rows = []
    for name, taken in seconds.items():
        kind = name.split(": ")[0]
        gigabytes = {"none": 0.0, "scarctl": statistics.median(written)}.get(
            name.split(": ")[1], nbytes
        ) / 1e9
        rows.append(
            (
                name,
                f"{ratio(taken, seconds[f'{kind}: none']):.3f}x",
                spread(taken, 1e-3, 0),
                f"{statistics.median(arms[name].slowest[1:]) * 1e3:.0f}",
                f"{gigabytes:.2f}",
            )
        )
    print(f"{steps} steps per arm; scarctl's stall per checkpoint: {spread(stalls, 1e-3, 0)} ms")
    print_table(("work: checkpoints", "of none", "ms per step (range)", "slowest step, ms", "GB"), rows)


if __name__ == "__main__":
    main()
