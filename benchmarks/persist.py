"""Measure the store's throughput, checksums and fsyncs included, compared with plain files of the same bytes.

python benchmarks/persist.py [--megabytes 512] [--rounds 7] [--folder DIR]

One line per case: throughput relative to the raw write or read of the same round (1.00 is as fast; the aims are 0.9
for writing and 0.8 for reading), GB/s with its range, and CPU seconds (user and system) per GB. A commit is what the
daemon does with a request, a restore what `recover` does with lost partitions. Files are dropped from the page cache
before they are read, as far as the system allows it.

  raw write + fsync      write(2) in 4 MiB pieces from memory to a new file, fsync of file and folder
  commit, all            a commit of every partition of a model with AdamW: segment, fsyncs, record
  commit, 1/8 scattered  a commit of every eighth partition of it
  small rows             the same for a table with 256-byte rows, every row one partition
  raw read               preadv in 4 MiB pieces into memory that is there
  restore                the same partitions into an arena that has none of them: read, checked, copied
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
from recover import evict
from timing import interleaved, parser, print_table, ratio, scratch, settle, spread

from scarctl.arena.arena import Arena
from scarctl.recovery.execute import ArenaSink, execute
from scarctl.recovery.plan import plan_partial
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import Store, open_writer

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
        """Return rows [start, stop) of a tensor."""
        return memoryview(self.tensors[group][tensor][start:stop].reshape(-1))


def dense(nbytes: int) -> Layout:
    """Return a model with AdamW: a dozen matrices of equal size, partitions of the default size."""
    rows = nbytes // (12 * len(SLOTS) * WIDTH * 4)
    return build_layout(
        (f"layer{i}.weight", "parameter", tuple(TensorSpec(s, "F32", (rows, WIDTH)) for s in SLOTS))
        for i in range(12)
    )


def table(nbytes: int) -> Layout:
    """Return an embedding table, 64 float32 per row, every row one partition."""
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


Found = tuple[dict[str, list[float]], dict[str, Measured]]
"""Seconds by case, and the cases."""


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


def raw_read(folder: Path, nbytes: int) -> Callable[[], None]:
    """Read what `raw` has written."""
    view = memoryview(bytearray(nbytes))

    def call() -> None:
        fd = os.open(folder / "raw", os.O_RDONLY)
        for start in range(0, nbytes, PIECE):
            os.preadv(fd, [view[start : start + PIECE]], start)
        os.close(fd)

    return call


def measure_reads(folder: Path, layout: Layout, ids: NDArray[np.int64], memory: Memory, rounds: int) -> Found:
    """Read the same partitions out of a store next to raw reads: as `measure`."""
    shard_of = np.zeros(layout.partitions, np.int32)
    store, arena = Store.create(folder / "read"), Arena.anonymous(layout)
    with open_writer(store, layout=layout) as writer:
        writer.commit(ids, memory.source, step=1)

    def restore() -> None:
        plan = plan_partial(ids, layout, shard_of, store.state(0, layout))
        execute(plan, store, None, ArenaSink(arena))

    def forget() -> None:
        evict(folder)
        arena.reset()

    nbytes = int(layout.partition_bytes[ids].sum())
    cases = {"raw": Measured(raw_read(folder, nbytes), forget), "store": Measured(restore, forget)}
    return interleaved(cases, rounds), cases


def measure(folder: Path, layout: Layout, every: int, rounds: int) -> tuple[dict[str, Found], int]:
    """Write and read every `every`th partition, next to raw files of as many bytes. Return figures, and the bytes."""
    ids = np.arange(0, layout.partitions, every)
    nbytes = int(layout.partition_bytes[ids].sum())
    memory = Memory(layout)
    data = np.frombuffer(np.random.default_rng(1).bytes(nbytes), np.uint8)
    store = Store.create(folder / "store")
    steps = itertools.count()

    def remove_old() -> None:
        for path in [folder / "raw", *(folder / "store/lanes/0/seg").glob("*")]:
            path.unlink(missing_ok=True)

    with open_writer(store, layout=layout) as writer:

        def commit() -> None:
            writer.commit(ids, memory.source, step=next(steps))

        cases = {"raw": Measured(raw(folder, data), remove_old), "store": Measured(commit, remove_old)}
        written = interleaved(cases, rounds), cases
    remove_old()
    raw(folder, data)()
    return {"write": written, "read": measure_reads(folder, layout, ids, memory, rounds)}, nbytes


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
                found, nbytes = measure(folder, layout, every, args.rounds)
            for way, (seconds, cases) in found.items():
                speed = {key: [nbytes / s / 1e9 for s in taken] for key, taken in seconds.items()}
                store = "commit" if way == "write" else "restore"
                labels = {"raw": f"raw {way}, {nbytes / 1e9:.2f} GB", "store": f"{store}, {name}{part}"}
                for key, label in labels.items():
                    cpu = statistics.median(cases[key].cpu[1:]) / nbytes * 1e9
                    count = f"{layout.partitions // every:,}" if key == "store" else ""
                    share = f"{ratio(speed[key], speed['raw']):.2f}"
                    rows.append((label, count, share, spread(speed[key]), f"{cpu:.2f}"))
    print_table(("case", "partitions", "of raw", "GB/s (range)", "CPU s/GB"), rows)


if __name__ == "__main__":
    main()
