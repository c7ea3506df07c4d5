"""Measure opening, reading and committing to stores with many partitions and a long history.

History: partitions, and commits of a part of them, one part after the other, every one of them kept (`--collect`:
collected meanwhile, as sessions do it). Then, each in a process of its own: `scarctl inspect`, and
opening for writing. Next to it is the time of a process that only imports click and numpy.

Large: opening a store of many partitions for writing, after a full commit and some of an eighth.

Commits: seconds of a commit of so many partitions, to stores of more and more partitions in all. It must not grow.

    python benchmarks/store_scale.py [--partitions 1000000] [--parts 512] [--commits 10000] [--large 10000000]

What is measured is durable as always; only the histories are made without waiting for the disk. The last commit has the
extras of a run that converges, so `inspect` has something to predict. Byte code is cached, as it is after a package's
first use, whatever PYTHONDONTWRITEBYTECODE says: in the temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scarctl.state.extras import Notes
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import Collector, Store, open_writer
from scarctl.theory.history import History

ROW = 16
OPEN = """
import sys, time
started = time.perf_counter()
from scarctl.store import Store, open_writer
imported = time.perf_counter()
store = Store.open(sys.argv[1])
layout = store.current_layout()
begun = time.perf_counter()
with open_writer(store, layout=layout):
    opened = time.perf_counter()
print(begun - imported, opened - begun, time.perf_counter() - opened)
"""


@contextmanager
def without_fsync() -> Iterator[None]:
    """Nothing waits for the disk: for making a history that is not measured."""
    kept = os.fsync, os.fdatasync
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync, os.fdatasync = kept


def lay_out(partitions: int) -> Layout:
    """Return an embedding table with one row per partition."""
    return build_layout(
        [("emb.weight", "parameter", (TensorSpec("", "U8", (partitions, ROW)),))], rows={"*": 1}
    )


def zeros(layout: Layout) -> Callable[[int, int, int, int], np.ndarray]:
    """Return a segment's source."""
    data = np.zeros((layout.partitions, ROW), np.uint8)
    return lambda g, t, start, stop: data[start:stop]


def converging(steps: int) -> dict[str, Any]:
    """Return Extras of a run that has come a thousandth nearer to its optimum with every thousandth of its steps."""
    gap = max(1, steps // 64)
    points = [(step, gap, float(np.exp(-10 * step / steps))) for step in range(0, steps - gap, gap)]
    return Notes(History(points).to_array(), "l2").to_tree()


def make_history(folder: Path, partitions: int, parts: int, commits: int, collect: bool) -> None:
    """Make a store with so many commits."""
    layout = lay_out(partitions)
    store = Store.create(folder)
    source = zeros(layout)
    with open_writer(store, layout=layout) as writer:
        collector = Collector(writer)
        writer.commit(np.arange(partitions), source, step=0, sealed=True, extras={"step": 0})
        for n in range(1, commits + 1):
            extras = converging(commits) if n == commits else None
            writer.commit(np.arange(n % parts, partitions, parts), source, step=n, extras=extras)
            if collect:
                collector.settle()
    store.close()


def best(command: list[str], repeats: int) -> float:
    """Least seconds of a process."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return min(times)


def opened(folder: Path, repeats: int) -> list[float]:
    """Least seconds of opening, of a writer's opening, and of its closing, each in a new process."""
    command = [sys.executable, "-c", OPEN, str(folder)]
    runs = [
        [float(x) for x in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]
        for _ in range(repeats)
    ]
    return [min(column) for column in zip(*runs, strict=True)]


def history(args: argparse.Namespace, folder: Path) -> None:
    """Prints the part about a long history."""
    with without_fsync():
        make_history(folder, args.partitions, args.parts, args.commits, args.collect)
    files = sum(len(names) for _, _, names in os.walk(folder))
    print(f"{args.partitions:,} partitions, {args.commits:,} commits, {files:,} files")
    scarctl = [sys.executable, "-m", "scarctl"]
    base = best([sys.executable, "-c", "import click, numpy"], args.repeats)
    print(f"  import click, numpy   {base:7.3f} s")
    for name, command in {
        "inspect": ["inspect", "--store", str(folder)],
        "inspect --json": ["inspect", "--store", str(folder), "--json"],
    }.items():
        print(f"  {name:<20}  {best([*scarctl, *command], args.repeats):7.3f} s")
    layout, writer, closing = opened(folder, args.repeats)
    print(f"  settings and layout   {layout:7.3f} s\n  open for writing      {writer:7.3f} s")
    print(f"  close                 {closing:7.3f} s")


def large(args: argparse.Namespace, folder: Path) -> None:
    """Prints the part about a large store."""
    with without_fsync():
        make_history(folder, args.large, 8, 4, collect=False)
    layout, writer, closing = opened(folder, args.repeats)
    print(f"{args.large:,} partitions")
    print(f"  settings and layout   {layout:7.3f} s\n  open for writing      {writer:7.3f} s")
    print(f"  close                 {closing:7.3f} s")


def commits(args: argparse.Namespace, folder: Path) -> None:
    """Prints the part about the cost of a commit."""
    print(f"commits of {args.saved:,} partitions, milliseconds each: median, mean")
    for partitions in args.totals:
        layout = lay_out(partitions)
        store = Store.create(folder / str(partitions))
        source, rng = zeros(layout), np.random.default_rng(0)
        with open_writer(store, layout=layout) as writer:
            collector = Collector(writer)
            writer.commit(np.arange(partitions), source, step=0)
            collector.settle()
            times = []
            for step in range(1, args.measured + 1):
                ids = np.unique(rng.integers(0, partitions, args.saved))
                started = time.perf_counter()
                writer.commit(ids, source, step=step)
                collector.settle()
                times.append(1e3 * (time.perf_counter() - started))
        store.close()
        print(f"  of {partitions:>10,}   {median(times):8.2f}   {sum(times) / len(times):8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partitions", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=512)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--large", type=int, default=10_000_000)
    parser.add_argument("--saved", type=int, default=4096)
    parser.add_argument("--totals", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--measured", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("history", "large", "commits"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scarctl-benchmark-") as base:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(base, "bytecode"))
        for part in (history, large, commits):
            if args.only in (None, part.__name__):
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    part(args, Path(folder))


if __name__ == "__main__":
    main()
