"""Measure in turns, print plain tables, and make temporary folders, for all benchmarks."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def interleaved(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each case returns, per round. The first round warms up, and does not count.

    Every round runs every case once and starts with another one, so that noise and slow drift hit all alike.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            taken = cases[name]()
            if number:
                seconds[name].append(taken)
    return seconds


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of value / base: both of the same round, so slow drift cancels."""
    return statistics.median(v / b for v, b in zip(values, base, strict=True))


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 3) -> str:
    """Median and range as text, in units of `unit`."""
    middle, low, high = (f(values) / unit for f in (statistics.median, min, max))
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a plain table: first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), flush=True)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have. The module's docstring says what is printed."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="disk to measure on (default: %(default)s)",
    )
    return made


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside `folder`, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="scarctl-benchmark-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def arenas(folder: Path) -> Iterator[str]:
    """Yield a temporary folder for arenas and their daemon: in shared memory, or in `folder` without any.

    Sessions in it must be closed inside. Removed when the daemon has ended.
    """
    base = Path("/dev/shm")
    with scratch(base if base.is_dir() else folder) as path:
        yield str(path)
        socket = path / f"scarctl-{os.getuid()}" / "daemon.sock"
        end = time.monotonic() + 60
        while socket.exists() and time.monotonic() < end:
            time.sleep(0.05)


def settle() -> None:
    """Wait until what earlier cases wrote is on the disk: no case pays for another."""
    os.sync()
