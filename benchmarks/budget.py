"""Measure how `interval="auto"` uses its budget of training time, with one process and with several ranks.

python benchmarks/budget.py [--rounds 5] [--ranks 2] [--mb 50] [--overhead 0.01] [--seconds 0.05] [--block 10]

Every rank has `--mb` MB of parameters and AdamW's moments, by FSDP2. A step is `--seconds` of sleep, in which an
accelerator would work, the optimizer's step, and a wait for all ranks. Blocks of `--block` seconds with a session and
without one take turns. The session has default options, but for its budget, and was warmed up with `--warm` seconds.

  interval     iterations between two checkpoints when the blocks have ended, and checkpoints in all blocks
  said         share of training time that the session itself has measured, in the blocks
  hooks        the part of it in hooks and waiting, which needs no comparison
  CPU          CPU time of the training thread per step, relative to a block without a session of the same round
  time         the same of the clock: on a busy machine it says nothing

One line per rank, medians over rounds with the range.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from ranked import build, run
from timing import interleaved, parser, print_table, spread
from torch import distributed as dist

import scarctl


class Block:
    """A separate training, perhaps with a session."""

    def __init__(self, args: Any, session_of: Any = None) -> None:
        self.seconds, self.block = args.seconds, args.block
        self.model, self.optimizer = build(args.mb)
        self.session: scarctl.Session | None = None
        if session_of is not None:
            self.session = session_of(self.model, self.optimizer)
        self.cpu: list[float] = []
        self.shares: list[tuple[float, float]] = []
        """In each block: the share in hooks, waiting and slower iterations; that in hooks and waiting alone."""
        self.optimizer.step()

    def train(self, seconds: float) -> tuple[float, float]:
        """Train for about so many seconds. Return seconds and CPU seconds of this thread per step."""
        steps = torch.tensor([0])
        start, cpu = time.perf_counter(), time.thread_time()
        going = torch.tensor([1])
        while int(going):
            time.sleep(self.seconds)
            self.optimizer.step()
            steps += 1
            # Rank 0 decides for all, and this is the wait for all ranks.
            going.fill_(int(time.perf_counter() - start < seconds))
            dist.broadcast(going, 0)
        count = int(steps)
        return (time.perf_counter() - start) / count, (time.thread_time() - cpu) / count

    def run(self) -> float:
        """Train for a block. Return seconds per step."""
        before, start = self._lost(), time.perf_counter()
        taken, cpu = self.train(self.block)
        passed, after = time.perf_counter() - start, self._lost()
        self.cpu.append(cpu)
        stalled, slowed = after[0] - before[0], after[1] - before[1]
        self.shares.append((max(0.0, stalled + slowed) / passed, stalled / passed))
        return taken

    def _lost(self) -> tuple[float, float]:
        stats = None if self.session is None else self.session.stats
        return (0.0, 0.0) if stats is None else (stats.stall_seconds, 2 * stats.copy_seconds)


def worker(args: Any) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    bare = Block(args)
    saved = Block(
        args,
        lambda model, optimizer: scarctl.attach(
            model,
            optimizer,
            store=Path(args.work_folder) / "store",
            settings=scarctl.Settings(arena_dir=args.arena_dir, on_error="raise", overhead=args.overhead),
        ),
    )
    saved.train(args.warm)
    session = saved.session
    assert session is not None
    before = session.stats.checkpoints
    taken = interleaved({"bare": bare.run, "session": saved.run}, args.rounds)
    row = (
        f"rank {dist.get_rank()} of {dist.get_world_size()}",
        f"{session.stats.interval}, {session.stats.checkpoints - before}",
        f"{spread([100 * share for share, _ in saved.shares[1:]], digits=2)} %",
        f"{spread([100 * share for _, share in saved.shares[1:]], digits=2)} %",
        _more(saved.cpu[1:], bare.cpu[1:]),
        _more(taken["session"], taken["bare"]),
    )
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    session.close(seal=False)
    if dist.get_rank() == 0:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, overhead={args.overhead}")
        print_table(("", "interval, checkpoints", "said", "hooks", "CPU", "time"), rows)
    dist.barrier()
    dist.destroy_process_group()


def _more(taken: list[float], base: list[float]) -> str:
    return f"{spread([100 * (a / b - 1) for a, b in zip(taken, base, strict=True)], digits=1)} %"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--mb", type=float, default=50, help="of parameters and moments on every rank")
    options.add_argument("--overhead", type=float, default=0.01)
    options.add_argument("--seconds", type=float, default=0.05, help="of work between two steps")
    options.add_argument("--block", type=float, default=10.0, help="seconds of a block")
    options.add_argument("--warm", type=float, default=30.0, help="seconds before the first block")
    run(options, __file__, worker)


if __name__ == "__main__":
    main()
