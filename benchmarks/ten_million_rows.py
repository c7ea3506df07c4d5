"""Measure checkpoints of an embedding table of millions of rows, each a partition, with sparse gradients.

python benchmarks/ten_million_rows.py [--rows 10000000] [--width 64] [--per 1] [--tracker auto] [--steps 41]

The table is N x 64 float32 with SparseAdam's two moments, 768 bytes per row. 10 M rows need 7.7 GB live and as much
in the arena, next to arrays over all partitions: 20 GB. Every step trains a batch of bags drawn by Zipf's law. Printed
are the times of the parts of a checkpoint that saves 1/64, how many rows each of them saved, and the memory of this
process, which saves, too: bytes per partition that are neither live values nor the arena, at the end and at most.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import arenas, parser, print_table, scratch, spread
from torch import nn

import scarctl

ARRAYS = 350
"""Bytes of arrays over partitions, for each."""


def available() -> int:
    """Return bytes of memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("no MemAvailable in /proc/meminfo")


class Memory:
    """Watches the private memory of this process: all but files and shared memory."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("no RssAnon in /proc/self/status")

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, self.now())

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def timed(times: dict[str, list[float]], name: str, owner: Any, method: str) -> None:
    """Have a method note how long each call takes."""
    inner = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            times.setdefault(name, []).append(time.perf_counter() - start)

    setattr(owner, method, call)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--width", type=int, default=64, help="values of a row")
    options.add_argument("--per", type=int, default=1, help="rows of a partition")
    options.add_argument("--tracker", default="auto", choices=["auto", "exact"])
    options.add_argument("--steps", type=int, default=41)
    options.add_argument("--batch", type=int, default=4096, help="bags of 8 rows")
    args = options.parse_args()
    row_bytes, partitions = 3 * 4 * args.width, -(-args.rows // args.per)
    need, have = 2 * args.rows * row_bytes + ARRAYS * partitions, available()
    if need > have:
        sys.exit(
            f"{args.rows:,} rows need {need / 1e9:.1f} GB of memory, and {have / 1e9:.1f} GB are free: "
            f"give --rows {int(0.9 * have * args.rows / need):,}"
        )
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    table = nn.EmbeddingBag(args.rows, args.width, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    edges = np.cumsum(1.0 / np.arange(1, args.rows + 1))
    edges /= edges[-1]

    def step() -> None:
        bags = torch.from_numpy(
            np.minimum(np.searchsorted(edges, rng.random((args.batch, 8))), args.rows - 1)
        )
        optimizer.zero_grad()
        table(bags).square().mean().backward()
        optimizer.step()

    times: dict[str, list[float]] = {}
    step()
    alone = Memory.now()
    with scratch(args.folder) as folder, arenas(folder) as arena_dir:
        os.environ["SCARCTL_ARENA_DIR"] = arena_dir
        session = scarctl.attach(
            table,
            optimizer,
            store=folder / "store",
            partitioning=scarctl.Partitioning(rows={"weight": args.per}),
            fraction=1 / 64,
            selection=scarctl.Selection(tracker=args.tracker),
            settings=scarctl.Settings(daemon=False),
        )
        memory = Memory()
        start = time.perf_counter()
        step()
        session.checkpoint(full=True, wait=True)
        first = time.perf_counter() - start
        engine = session._started()
        timed(times, "compare", engine.tracker, "look")
        timed(times, "choose", engine.selector, "select")
        timed(times, "copy in all", engine, "copy")
        timed(times, "persist in all", engine.saver.thread._persister, "persist")
        saved = session.stats.saved_bytes
        written: list[int] = []
        for _ in range(2, args.steps + 1):
            step()
            session._saving.finish()
            if session.stats.saved_bytes > saved:
                written.append(session.stats.saved_bytes - saved)
                saved = session.stats.saved_bytes
                engine.saver.drain(300)
        memory.end()
        more = [nbytes / partitions for nbytes in (memory.now() - alone, memory.most - alone)]
        rows = [[name, spread(found, 1e-3, 1), str(len(found))] for name, found in times.items()]
        session.close(seal=False)
    print(
        f"{args.rows:,} rows, {args.per} per partition, tracker {args.tracker}; "
        f"the first checkpoint, of all, took {first:.1f} s"
    )
    print_table(["part", "ms", "times"], rows)
    print(f"rows per checkpoint: {[nbytes // row_bytes for nbytes in written]}")
    print(
        f"bytes of memory for each partition in addition to its values: {more[0]:.0f}, at most {more[1]:.0f}"
    )


if __name__ == "__main__":
    main()
