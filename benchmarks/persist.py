"""Bytes per second into the store, with all checksums and fsyncs, next to a raw write with fsync of the same bytes.

python benchmarks/persist.py [--megabytes 512] [--rounds 7] [--folder DIR]

One line per case: throughput relative to the raw write of the same round (1.00 is as fast; the aim is at least
0.80), GB/s with its range, and CPU seconds (user and system) per GB.

  raw write + fsync      write(2) in 4 MiB pieces from memory to a new file, fsync of file and folder
  commit, all            a commit of every partition of a model with AdamW: segment, fsyncs, record
  commit, 1/8 scattered  a commit of every eighth partition of it
  small rows             the same for a table with 256-byte rows, every row one partition
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from timing import interleaved, parser, print_table, ratio, scratch, settle, spread

from scarctl.layout import Layout, TensorSpec, build_layout
from scarctl.store import Store

PIECE = 4 << 20
SLOTS = ("", "exp_avg", "exp_avg_sq")
WIDTH = 768


class Memory:
    """Tensors of a layout in plain memory, filled with random bytes: what the arena is to the persister."""

    def __init__(self, layout: Layout) -> None:
        rng = np.random.default_rng(0)
        self.tensors = [
            [
                np.frombuffer(rng.bytes(spec.nbytes), np.uint8).reshape(spec.rows, spec.row_bytes)
                for spec in group.tensors
            ]
            for group in layout.groups
        ]

    def source(self, group: int, tensor: int, start: int, stop: int) -> memoryview:
        """Rows [start, stop) of a tensor."""
        return memoryview(self.tensors[group][tensor][start:stop].reshape(-1))


def dense(nbytes: int) -> Layout:
    """A model with AdamW: a dozen matrices of equal size, partitions of the default size."""
    rows = nbytes // (12 * len(SLOTS) * WIDTH * 4)
    return build_layout(
        (f"layer{i}.weight", "parameter", tuple(TensorSpec(s, "F32", (rows, WIDTH)) for s in SLOTS))
        for i in range(12)
    )


def table(nbytes: int) -> Layout:
    """An embedding table, 64 float32 per row, every row one partition."""
    spec = TensorSpec("", "F32", (nbytes // 256, 64))
    return build_layout([("table.weight", "parameter", (spec,))], rows={"*": 1})


class Measured:
    """One case: seconds by its return value, CPU seconds on the side. `before` runs unmeasured."""

    def __init__(self, call: Callable[[], None], before: Callable[[], None]) -> None:
        self.call = call
        self.before = before
        self.cpu: list[float] = []

    def __call__(self) -> float:
        self.before()
        settle()
        cpu, start = time.process_time(), time.perf_counter()
        self.call()
        taken = time.perf_counter() - start
        self.cpu.append(time.process_time() - cpu)
        return taken


def raw(folder: Path, data: NDArray[np.uint8]) -> Callable[[], None]:
    """Write `data` to a new file and make it durable."""
    view = memoryview(data)

    def call() -> None:
        fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for start in range(0, len(view), PIECE):
            os.write(fd, view[start : start + PIECE])
        os.fsync(fd)
        os.close(fd)
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    return call


def measure(
    folder: Path, layout: Layout, every: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Measured], int]:
    """Commits of every `every`th partition next to raw writes of as many bytes: seconds, cases, bytes."""
    ids = np.arange(0, layout.partitions, every)
    nbytes = int(layout.partition_bytes[ids].sum())
    memory = Memory(layout)
    data = np.frombuffer(np.random.default_rng(1).bytes(nbytes), np.uint8)
    store = Store.create(folder / "store")
    steps = itertools.count()

    def remove_old() -> None:
        for path in [folder / "raw", *(folder / "store/shards/0/seg").glob("*")]:
            path.unlink(missing_ok=True)

    with store.writer(layout=layout, shard_of=np.zeros(layout.partitions, np.int32)) as writer:

        def commit() -> None:
            writer.commit(0, ids, memory.source, step=next(steps))

        cases = {"raw": Measured(raw(folder, data), remove_old), "commit": Measured(commit, remove_old)}
        seconds = interleaved(cases, rounds)
    return seconds, cases, nbytes


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=512)
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()

    rows = []
    for name, make in (("", dense), ("small rows, ", table)):
        layout = make(args.megabytes << 20)
        for part, every in (("all", 1), ("1/8 scattered", 8)):
            with scratch(args.folder) as folder:
                seconds, cases, nbytes = measure(folder, layout, every, args.rounds)
            speed = {key: [nbytes / s / 1e9 for s in taken] for key, taken in seconds.items()}
            labels = {"raw": f"raw write + fsync, {nbytes / 1e9:.2f} GB", "commit": f"commit, {name}{part}"}
            for key, label in labels.items():
                cpu = statistics.median(cases[key].cpu[1:]) / nbytes * 1e9
                count = f"{layout.partitions // every:,}" if key == "commit" else ""
                share = f"{ratio(speed[key], speed['raw']):.2f}"
                rows.append((label, count, share, spread(speed[key]), f"{cpu:.2f}"))
    print_table(("case", "partitions", "of raw", "GB/s (range)", "CPU s/GB"), rows)


if __name__ == "__main__":
    main()
