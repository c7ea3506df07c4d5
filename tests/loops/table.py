"""Run every program of `tests.loops.programs`, stopped in each way and restarted: each ends as it would have.

python -m tests.loops.table [PROGRAM ...] runs these programs, or all of them; --list shows their names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.loops.programs import PROGRAMS
from tests.support import forkserver

STOPS = ("close", "SIGTERM", "SIGKILL")
AT = (5, 7)
"""Steps at which programs stop: one in the middle of an epoch, and the last of an epoch."""


def program(folder: Path, name: str, store: str, stop: str = "none", at: int = 0, **env: str) -> Any:
    """Run a program; return its document, or None if it was stopped."""
    folder.mkdir(exist_ok=True)
    arena = {"SCARCTL_ARENA_DIR": str(folder), "SCARCTL_DAEMON": "0", "OMP_NUM_THREADS": "1"}
    done = forkserver.run(
        ["-m", "tests.loops.programs", name, str(folder / store), stop, str(at)],
        timeout=100,
        env={**os.environ, **arena, **env},
        imports=(*forkserver.TORCH, *_own()),
    )
    if stop == "none":
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    assert not done.returncode or stop.startswith("SIG"), done.stderr
    return None


_thread = threading.local()
_threads = iter(range(100))


def _own() -> tuple[str, ...]:
    """Return a prefix that gives each thread its own server: a waiting server takes in the answers to others."""
    if not hasattr(_thread, "number"):
        _thread.number = next(_threads)
    return ("json",) * _thread.number


@dataclass
class Row:
    name: str
    stop: str
    step: int
    consistent: bool
    declared: bool
    same: bool

    @property
    def outcome(self) -> str:
        label = "consistent" if self.consistent else "mixed"
        return f"{label}, position {'declared' if self.declared else 'unknown'}, {'same' if self.same else 'different'}"


def rows(folder: Path, name: str, stops: tuple[str, ...], at: int) -> Iterator[Row]:
    whole = program(folder, name, "whole")
    for stop in stops:
        program(folder, name, stop, stop, at)
        found = program(folder, name, stop, **({"ROLL_BACK": "1"} if stop == "SIGKILL" else {}))
        assert found["step"] > 0, f"{name} {stop}: nothing was resumed"
        same = found["digest"] == whole["digest"]
        yield Row(name, stop, found["step"], found["consistent"], found["declared"], same)


def wrong(row: Row) -> bool:
    """Return whether a program did not continue as if it had not been stopped."""
    return not (row.consistent and row.declared and row.same)


def show(found: list[Row]) -> str:
    lines = [f"  {r.name:34} {r.stop:8} step {r.step:2}  {r.outcome}" for r in found]
    return "\n".join(["", *lines, f"cases {len(found)}, wrong {sum(map(wrong, found))}"])


def table(folder: Path, cases: Iterable[tuple[str, tuple[str, ...], int]], threads: int = 1) -> list[Row]:
    """Return the rows of programs, stopped in these ways after this step."""

    def one(item: tuple[int, tuple[str, tuple[str, ...], int]]) -> list[Row]:
        number, case = item
        return list(rows(folder / str(number), *case))

    with ThreadPoolExecutor(threads) as pool:
        return [row for found in pool.map(one, enumerate(cases)) for row in found]


def main() -> None:
    """Run everything, or the named programs."""
    parser = argparse.ArgumentParser(prog="python -m tests.loops.table", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the names of all programs")
    parser.add_argument("program", nargs="*", help="names of programs; default: all")
    given = parser.parse_args()
    names = given.program or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"no such program: {', '.join(unknown)}")
    if given.list:
        print("\n".join(names))  # noqa: T201
        return
    with tempfile.TemporaryDirectory(prefix="scarctl-") as folder:
        found = table(Path(folder), [(name, STOPS, at) for name in names for at in AT], threads=2)
    print(show(found), f"programs {len(names)}")  # noqa: T201
    bad = [row for row in found if wrong(row)]
    print("wrong:", *bad, sep="\n  ")  # noqa: T201
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
