"""Test the table of loops; see `tests.loops.table`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loops.programs import PROGRAMS, TORCHDATA
from tests.loops.table import AT, STOPS, Row, show, table, wrong

PARTS = 2


def check(found: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(show(found))  # noqa: T201
    assert not [row for row in found if wrong(row)]


@pytest.mark.leaves_arena
@pytest.mark.parametrize("part", range(PARTS))
def test_some_of_the_programs_stopped_in_one_way(
    arena_dir: Path, capsys: pytest.CaptureFixture[str], part: int
) -> None:
    names = [name for name in PROGRAMS if name not in TORCHDATA][::6]
    cases = [(name, (STOPS[number % 3],), 7) for number, name in enumerate(names)]
    check(table(arena_dir, cases[part::PARTS]), capsys)


@pytest.mark.skipif(not TORCHDATA.keys() <= PROGRAMS.keys(), reason="torchdata is not installed")
@pytest.mark.leaves_arena
@pytest.mark.long
def test_torchdatas_loader(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(table(arena_dir, [("stateful loader, 2 workers", ("SIGKILL",), 7)]), capsys)


@pytest.mark.leaves_arena
@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_stopped_in_every_way(arena_dir: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    check(table(arena_dir, [(name, STOPS, at) for at in AT]), capsys)
