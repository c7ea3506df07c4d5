"""Every program of `tests.loops.programs`, stopped in each way and started again: exact and the same, or said not to be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.loops.programs import PROGRAMS
from tests.support import forkserver

STOPS = ("close", "SIGTERM", "SIGKILL")
IMPORTS = (*forkserver.TORCH, "tests.loops.programs")
SAID = {
    "mnist, persistent workers",
    "mnist, stream that draws",
    "mnist by hand",
    "mnist by hand, 2 workers",
    "mnist by hand, generator",
    "vae by hand",
    "dcgan by hand",
    "words by hand",
    "mingpt by hand",
    "nanogpt, prefetched",
    "nanogpt by hand, prefetched",
    "cleanrl by hand",
    "average by hand, extras",
    "scaler by hand, step",
}
"""Programs that do not resume exactly, and are told so."""


def program(folder: Path, name: str, store: str, stop: str = "none", at: int = 0, **env: str) -> Any:
    """Run it; its document, or None if it was stopped."""
    folder.mkdir(exist_ok=True)
    arena = {"SCARCTL_ARENA_DIR": str(folder), "SCARCTL_DAEMON": "0", "OMP_NUM_THREADS": "1"}
    done = forkserver.run(
        ["-m", "tests.loops.programs", name, str(folder / store), stop, str(at)],
        timeout=100,
        env={**os.environ, **arena, **env},
        imports=IMPORTS,
    )
    if stop == "none":
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    assert not done.returncode or stop.startswith("SIG"), done.stderr
    return None


@dataclass
class Row:
    name: str
    stop: str
    exact: bool
    same: bool
    step: int
    reasons: list[str]

    @property
    def outcome(self) -> str:
        if self.exact:
            return "exact and same" if self.same else "silent: exact and different"
        return "said, and same" if self.same else "said"


def rows(folder: Path, name: str, stops: tuple[str, ...], at: int) -> Iterator[Row]:
    whole = program(folder, name, "whole")
    for stop in stops:
        program(folder, name, stop, stop, at)
        found = program(folder, name, stop, **({"ROLL_BACK": "1"} if stop == "SIGKILL" else {}))
        assert found["step"] > 0, f"{name} {stop}: nothing was resumed"
        yield Row(name, stop, found["exact"], found["digest"] == whole["digest"], found["step"], found["reasons"])


def check(found: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()  # noqa: T201
        for row in found:
            print(f"  {row.name:34} {row.stop:8} step {row.step:2}  {row.outcome:16} {'; '.join(row.reasons)}")  # noqa: T201
        exact = sum(row.exact and row.same for row in found)
        silent = sum(row.exact and not row.same for row in found)
        print(f"cases {len(found)}, exact {exact}, said {len(found) - exact - silent}, silent {silent}")  # noqa: T201
    wrong = [row for row in found if row.exact != (row.name not in SAID) or (row.exact and not row.same)]
    assert not wrong, wrong


def table(folder: Path, stops: dict[str, tuple[str, ...]], at: int) -> list[Row]:
    def one(item: tuple[int, str]) -> list[Row]:
        number, name = item
        return list(rows(folder / str(number), name, stops[name], at))

    with ThreadPoolExecutor(2) as pool:
        return [row for found in pool.map(one, enumerate(stops)) for row in found]


@pytest.mark.leaves_arena
@pytest.mark.timeout(1500)
@pytest.mark.long
@pytest.mark.parametrize("at", [5, 7])
def test_every_program_stopped_in_every_way(
    arena_dir: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    """After the last step of an epoch, and in the middle of one."""
    check(table(arena_dir, dict.fromkeys(PROGRAMS, STOPS), at), capsys)


@pytest.mark.leaves_arena
@pytest.mark.timeout(600)
def test_every_program_stopped_in_one_way(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stops = {name: (STOPS[number % 3],) for number, name in enumerate(PROGRAMS)}
    check(table(arena_dir, stops, 7), capsys)
