"""Time whole processes: `import scarctl`, `scarctl --help`, `scarctl inspect`, next to importing click and numpy.

python benchmarks/startup.py [--rounds 21] [--partitions 10000] [--folder DIR]

One line per command: its median time in milliseconds with the range, and what it takes beyond importing click and
numpy in the same round (the aim is at most +100 ms). Commands run in turn, each as a process of its own. Byte code is
cached, as it is after a package's first use, whatever PYTHONDONTWRITEBYTECODE says: in a temporary folder.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from timing import interleaved, parser, print_table, scratch, spread

from scarctl.state.layout import TensorSpec, build_layout
from scarctl.store import Store, open_writer

BASE = 'python -c "import click, numpy"'


def make_store(path: Path, partitions: int, commits: int = 8) -> None:
    """Make a store with an embedding table of one-row partitions: one full commit, then partial ones."""
    spec = TensorSpec("", "F32", (partitions, 64))
    layout = build_layout([("table.weight", "parameter", (spec,))], rows={"*": 1})
    rows = np.zeros((partitions, 256), np.uint8)
    with open_writer(Store.create(path), layout=layout) as writer:
        for step in range(commits):
            ids = np.arange(partitions) if step == 0 else np.arange(step, partitions, 8)
            writer.commit(ids, lambda g, t, a, b: rows[a:b], step=step)


def process(command: list[str], environment: dict[str, str]) -> Callable[[], float]:
    """Runs `command` and returns the seconds of the whole process."""

    def run() -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        return time.perf_counter() - start

    return run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=21)
    options.add_argument("--partitions", type=int, default=10_000)
    args = options.parse_args()
    script = Path(sys.executable).parent / "scarctl"
    with scratch(args.folder) as folder:
        store = folder / "store"
        make_store(store, args.partitions)
        commands = {
            'python -c ""': [sys.executable, "-c", ""],
            BASE: [sys.executable, "-c", "import click, numpy"],
            'python -c "import scarctl"': [sys.executable, "-c", "import scarctl"],
            "scarctl --help": [str(script), "--help"],
            "scarctl inspect --json": [str(script), "inspect", "--json", "--store", str(store)],
            "scarctl inspect --json --limit all": [
                str(script),
                "inspect",
                "--json",
                "--limit",
                "all",
                "--store",
                str(store),
            ],
            "scarctl inspect": [str(script), "inspect", "--store", str(store)],
        }
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        seconds = interleaved(
            {name: process(command, environment) for name, command in commands.items()}, args.rounds
        )
    rows = []
    for name, taken in seconds.items():
        beyond = statistics.median(t - b for t, b in zip(taken, seconds[BASE], strict=True))
        rows.append((name, f"{beyond * 1e3:+.0f} ms", spread(taken, 1e-3, 0)))
    print_table(("command", "beyond click, numpy", "ms (range)"), rows)


if __name__ == "__main__":
    main()
