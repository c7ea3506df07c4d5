"""Test the output of `scarctl inspect` on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from scarctl.cli.inspect_view import draw, heatmap
from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.cli.conftest import Model, Run
from tests.support.ranks import RankStore


def screen(store: str, **options: object) -> str:
    out = io.StringIO()
    draw(survey(Store.open(store), None), Console(file=out, width=60, **options))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.leaves_arena
def test_a_terminal_shows_a_heatmap_and_tables(run: Run, saved: Model) -> None:
    saved.train("layers.5.w")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 6, "--fraction", "0.05")
    text = screen("ckpt", force_terminal=True, color_system="standard")
    assert "\x1b[" in text
    plain = screen("ckpt")
    assert "\x1b" not in plain
    assert "staleness, 1 partition per cell: " in plain
    assert "█" in plain
    assert "stalest" in plain
    Store.create("empty")
    assert "nothing is saved" in screen("empty")


def test_a_heatmap_of_many_partitions_fits_the_screen() -> None:
    staleness = np.arange(100_000)
    staleness[5] = -1
    lines = heatmap(staleness, 50)
    assert all(len(line.plain) <= 50 for line in lines[:-1])
    assert len(lines) <= 13
    cells = "".join(line.plain for line in lines[:-1])
    assert cells[0] == "!"
    assert cells[1] == "·"
    assert cells[-1] == "█"
    assert "never saved" in lines[-1].plain
    assert heatmap(np.zeros(3, dtype=np.int64), 50)[0].plain == "···"
    assert heatmap(np.full(3, -1), 50)[0].plain == "!!!"
    assert heatmap(np.array([0, 1, 1 << 40]), 50)[0].plain == "··█"


def test_a_terminal_shows_a_line_for_every_rank(tmp_path: Path) -> None:
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(3)
    made.close()
    out = io.StringIO()
    draw(survey(made.store, None), Console(file=out, width=140, force_terminal=False))
    text = out.getvalue()
    assert "process" in text
    assert text.count("not on this host") == 2


def test_a_narrow_terminal_leaves_columns_out_instead_of_breaking_numbers(tmp_path: Path) -> None:
    made = RankStore(tmp_path / "ckpt", 2)
    made.save(3)
    made.close()
    out = io.StringIO()
    draw(survey(made.store, None), Console(file=out, width=80, force_terminal=False))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    (title,) = (line for line in lines if line.startswith("ranks ("))
    assert title == "ranks (a wider terminal shows: bytes, head, durable, partitions)"
    at = lines.index(title)
    assert lines[at + 1].split("  ")[-2:] == ["change if lost", "rework"]
    assert "not on this host" in lines[at + 2]
    assert "not on this host" in lines[at + 3]


def test_a_map_for_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without colours levels still differ in their shape."""
    staleness = np.array([-1, 0, 1, 2, 3, 4], dtype=np.int64)
    for encoding in ("ascii", "latin-1"):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        text = "".join(map(str, heatmap(staleness, 60)))
        assert text.isascii()
        assert text.startswith("!.:+%#")
