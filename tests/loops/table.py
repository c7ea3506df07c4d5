"""Run every program of `tests.loops.programs`, stopped in each way and restarted: exact and the same, or reported.

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
REPORTED = {
    "mnist, persistent workers",
    "mnist, stream that draws",
    "mnist by hand",
    "mnist by hand, 2 workers",
    "mnist by hand, generator",
    "distributed sampler by hand",
    "distributed sampler, own epochs",
    "own epochs",
    "own epochs and schedule",
    "stateful loader by hand, 2 workers",
    "vae by hand",
    "dcgan by hand",
    "words by hand",
    "mingpt by hand",
    "nanogpt, prefetched",
    "nanogpt by hand, prefetched",
    "cleanrl by hand",
    "average by hand, extras",
    "scaler by hand, step",
    "enumerated",
    "loaded",
    "scaled through .data",
    "wrong order",
    "frozen once",
    "dropout changed once",
    "other batch size",
    "other data",
    "lazy augmentation",
    "cleared",
    "carried gradients",
    "scaled gradients",
    "target",
    "tasks",
    "twice",
    "unlabelled",
    "retried",
    "cycled",
    "counting",
    "two sessions",
    "pruned",
    "replay, not saved",
    "replay by hand",
    "workers and sampler",
    "workers and saved sampler",
    "finder",
    "contrast",
}
"""Programs that resume exactly only if they were stopped between two epochs, and get a report otherwise."""
DOUBTED = {
    ("seeded by step", "close"),
    ("stateful loader by hand, extras", "close"),
    ("byol by hand", "close"),
    ("phases", "close"),
    ("thawed", "close"),
    ("thawed, own group", "close"),
    ("thawed, first optimizer", "close"),
    ("replay", "close"),
    ("sharpness", "SIGTERM"),
}
"""Cases in which nothing after the saved state would show how the loop continues, or in which a busy machine handles
the signal while disturbed weights are in place of the trained ones."""


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
    exact: bool
    same: bool
    step: int
    reasons: list[str]
    warned: bool = True
    """Each reason was logged at WARNING by the run that was resumed."""
    shown: bool = True
    """`scarctl inspect` shows a caveat, before or right after the resume, or after the run."""

    @property
    def silent(self) -> bool:
        return self.outcome.startswith("silent")

    @property
    def outcome(self) -> str:
        if self.exact:
            return "exact and same" if self.same else "silent: exact and different"
        if not (self.warned and self.shown):
            return "silent: no " + ("caveat" if self.warned else "warning")
        return "reported, and same" if self.same else "reported"


def rows(folder: Path, name: str, stops: tuple[str, ...], at: int) -> Iterator[Row]:
    whole = program(folder, name, "whole")
    for stop in stops:
        program(folder, name, stop, stop, at)
        found = program(folder, name, stop, **({"ROLL_BACK": "1"} if stop == "SIGKILL" else {}))
        assert found["step"] > 0, f"{name} {stop}: nothing was resumed"
        reasons, said = found["reasons"], "\n".join(found["warnings"])
        yield Row(
            name,
            stop,
            found["exact"],
            found["digest"] == whole["digest"],
            found["step"],
            reasons,
            bool(reasons) and all(reason in said for reason in reasons),
            bool(found["cautions"]),
        )


def wrong(row: Row) -> bool:
    """Return whether a result is silent, or unexpectedly not exact."""
    expected = row.name in REPORTED or (row.name, row.stop) in DOUBTED
    return row.silent or not (row.exact or expected)


def show(found: list[Row]) -> str:
    lines = [
        f"  {r.name:34} {r.stop:8} step {r.step:2}  {r.outcome:18} {'; '.join(r.reasons)}" for r in found
    ]
    silent = sum(row.silent for row in found)
    exact = sum(row.exact and row.same for row in found)
    reported = len(found) - exact - silent
    return "\n".join(["", *lines, f"cases {len(found)}, exact {exact}, reported {reported}, silent {silent}"])


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
