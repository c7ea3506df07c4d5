"""How far the store falls behind a small, fast run, with one shard and with eight.

python benchmarks/shards.py [--steps 600] [--interval 5] [--step-ms 4] [--rounds 3] [--folder DIR]

A model of 3.3 MiB with AdamW trains with steps of a fixed length (computing takes less, the rest is slept), its daemon
saves. Lag is the number of iterations between now and the oldest copy that the store has not, read after every
iteration of the run's second half. Commits are records per second over the whole run, of all shards together.
The first line of a round also says what one fsync of a small new file and of its folder takes, one after another.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from timing import arenas, parser, print_table, scratch

import scarctl
from scarctl.store import Store

WIDTH = 304
LAYERS = 3


def fsync_seconds(folder: Path, count: int = 20) -> float:
    """Median time to create a small file, to sync it, and to sync its folder."""
    times = []
    for k in range(count):
        started = time.perf_counter()
        fd = os.open(folder / f"sync-{k}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, b"x" * 4096)
        os.fsync(fd)
        os.close(fd)
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def train(
    folder: Path, arena_dir: str, shards: int, *, steps: int, interval: int, step_seconds: float
) -> dict[str, float]:
    """One run; what came of it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(8, WIDTH)
    lags = []
    store = folder / "run"
    with scarctl.attach(
        model, optimizer, store=store, interval=interval, shards=shards, arena_dir=arena_dir
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
        records = sum(state.seq + 1 for state in Store.open(store).states(range(shards)).values())
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
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--shards", type=int, nargs="+", default=[1, 8])
    args = options.parse_args()
    torch.set_num_threads(1)
    rows = []
    with scratch(args.folder) as folder, arenas(args.folder) as arena_dir:
        for _ in range(args.rounds):
            sync = fsync_seconds(Path(tempfile.mkdtemp(dir=folder)))
            for shards in args.shards:
                found = train(
                    Path(tempfile.mkdtemp(dir=folder)),
                    arena_dir,
                    shards,
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
                        f"{1000 * sync:.2f}",
                    )
                )
    print_table(("shards", "lag, median", "worst", "commits/s", "ms per step", "fsyncs, ms"), rows)


if __name__ == "__main__":
    main()
