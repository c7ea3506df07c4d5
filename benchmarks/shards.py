"""Compare eight shards with one in a small, fast run: time of a commit, and how far the store falls behind.

python benchmarks/shards.py [--rounds 5] [--commits 12] [--steps 600] [--interval 5] [--step-ms 4]
    [--width 304] [--folder DIR]

A state of 3.3 MiB with AdamW. First an eighth of it is committed, again and again. Printed are milliseconds of each,
its ratio to one shard of the same round, and milliseconds of processor time, the kernel's included, which depends less
on what else the machine does.
Then the state trains with steps of a fixed length (computing takes less, the rest is slept), and its daemon saves. Lag
is the number of iterations between now and the oldest copy that the store has not, read after every iteration of the
run's second half. Commits are records per second.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from persist import SLOTS, Memory
from timing import arenas, interleaved, parser, print_table, ratio, scratch, spread

import scarctl
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import Store, open_writer

LAYERS = 3


def state(width: int) -> Layout:
    """Three linear layers with AdamW."""
    shapes = [(f"{n}.weight", (width, width)) for n in range(LAYERS)]
    shapes += [(f"{n}.bias", (width,)) for n in range(LAYERS)]
    return build_layout(
        (name, "parameter", tuple(TensorSpec(slot, "F32", shape) for slot in SLOTS)) for name, shape in shapes
    )


class Writing:
    """One store, and commits of an eighth of the state to it."""

    def __init__(self, folder: Path, shards: int, *, count: int, width: int) -> None:
        self.layout = state(width)
        self.memory = Memory(self.layout)
        store = Store.create(folder / "run", shards=shards)
        self.writer = open_writer(store, layout=self.layout)
        self.count = count
        self.step = 0
        self.processor = 0.0
        """Seconds of processor time in all commits so far."""

    def __call__(self) -> float:
        """Return the seconds of a commit."""
        started, before = time.perf_counter(), time.process_time()
        for _ in range(self.count):
            self.step += 1
            picked = np.arange(self.step % 8, self.layout.partitions, 8)
            self.writer.commit(picked, self.memory.source, step=self.step)
        self.processor += time.process_time() - before
        return (time.perf_counter() - started) / self.count


def commits(folder: Path, rounds: int, count: int, width: int) -> None:
    """Print the table of commits."""
    each = {
        name: Writing(Path(tempfile.mkdtemp(dir=folder)), shards, count=count, width=width)
        for name, shards in (("1 shard", 1), ("8 shards", 8))
    }
    found = interleaved(each, rounds)
    rows = [
        (
            name,
            spread(times, 1e-3, 1),
            f"{ratio(times, found['1 shard']):.1f}",
            f"{1000 * each[name].processor / each[name].step:.1f}",
        )
        for name, times in found.items()
    ]
    print_table(("commit", "ms", "of one shard", "processor, ms"), rows)


def train(
    folder: Path,
    arena_dir: str,
    shards: int,
    *,
    width: int,
    steps: int,
    interval: int,
    step_seconds: float,
) -> dict[str, float]:
    """Make one run, and return its figures."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(8, width)
    lags = []
    store = folder / "run"
    with scarctl.attach(
        model,
        optimizer,
        store=store,
        interval=interval,
        partitioning=scarctl.Partitioning(shards=shards),
        settings=scarctl.Settings(arena_dir=arena_dir),
    ) as session:
        session.resume()
        started = time.perf_counter()
        for step in range(steps):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            left = started + (step + 1) * step_seconds - time.perf_counter()
            if left > 0:
                time.sleep(left)
            if step >= steps // 2:
                lags.append(session.lag)
        seconds = time.perf_counter() - started
        saved = Store.open(store)
        records = sum(sum(1 for _ in saved.log(lane).records()) for lane in saved.shards())
    return {
        "lag": statistics.median(lags),
        "worst": max(lags),
        "commits": records / seconds,
        "step_ms": 1000 * seconds / steps,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=600)
    options.add_argument("--interval", type=int, default=5)
    options.add_argument("--step-ms", type=float, default=4.0)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--runs", type=int, default=2, help="of the training")
    options.add_argument("--commits", type=int, default=12, help="of each case in a round")
    options.add_argument("--width", type=int, default=304, help="of the three layers")
    options.add_argument("--shards", type=int, nargs="+", default=[1, 8])
    args = options.parse_args()
    torch.set_num_threads(1)
    rows = []
    with scratch(args.folder) as folder, arenas(args.folder) as arena_dir:
        commits(folder, args.rounds, args.commits, args.width)
        for _ in range(args.runs):
            for shards in args.shards:
                found = train(
                    Path(tempfile.mkdtemp(dir=folder)),
                    arena_dir,
                    shards,
                    width=args.width,
                    steps=args.steps,
                    interval=args.interval,
                    step_seconds=args.step_ms / 1000,
                )
                rows.append(
                    (
                        str(shards),
                        f"{found['lag']:.0f}",
                        f"{found['worst']:.0f}",
                        f"{found['commits']:.0f}",
                        f"{found['step_ms']:.2f}",
                    )
                )
    print_table(("shards", "lag, median", "worst", "commits/s", "ms per step"), rows)


if __name__ == "__main__":
    main()
