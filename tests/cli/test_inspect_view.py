"""Test the tables of `scarctl inspect` on terminals of several widths."""

from __future__ import annotations

import re
from pathlib import Path

from scarctl.cli.inspect_view import plain
from scarctl.ops.survey import survey
from tests.support.ranks import RankStore


def test_a_narrow_terminal_leaves_columns_out_instead_of_breaking_numbers(tmp_path: Path) -> None:
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(3)
    made.close()
    lines = [line.rstrip() for line in plain(survey(made.store, None), 80).splitlines()]
    (title,) = (line for line in lines if line.startswith("ranks ("))
    assert title == "ranks (a wider terminal shows: bytes, head, durable, partitions)"
    at = lines.index(title)
    assert re.split(r" {2,}", lines[at + 1])[-2:] == ["change if lost", "rework"]
    assert "not on this host" in lines[at + 2]
    assert "not on this host" in lines[at + 3]
