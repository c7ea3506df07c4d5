"""What `scarctl inspect` draws on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scarctl.cli.inspect import (
    PARTITION_COLUMNS,
    TOP,
    Survey,
    part_table,
    partition_rows,
    summary,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# A level has a colour and a shape of its own: readable without colours too.
LEVELS = (("·", "green"), ("░", "cyan"), ("▒", "yellow"), ("▓", "dark_orange"), ("█", "red"))
NEVER = ("!", "bold magenta")
MAX_LINES = 12


def draw(view: Survey, console: Console) -> None:
    """Write `page` to `console`."""
    for part in page(view, console.width):
        console.print(part)


def page(view: Survey, width: int) -> list[RenderableType]:
    """Summary, heatmap and tables, top to bottom, for a terminal of `width` columns."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(line) for line in summary(view)]
    if view.layout is None:
        return parts
    parts += ["", *heatmap(view.staleness, width - 2)]
    parts += _table(*part_table(view))
    parts += _table("stalest", PARTITION_COLUMNS, partition_rows(view.stalest(TOP), view.age))
    changed = partition_rows(view.most_changed(TOP), view.age)
    if changed:
        parts += _table("most changed", PARTITION_COLUMNS, changed)
    return parts


def heatmap(staleness: NDArray[np.int64], width: int) -> list[Text]:
    """Lines of a map of all partitions in order, one cell per bucket of them, and a legend.

    staleness: int64 of shape (partitions,), in iterations, -1 never saved. A cell shows the stalest of its bucket.
    """
    from rich.text import Text

    width = max(width, 10)
    count = len(staleness)
    per_cell = max(1, -(-count // (width * MAX_LINES)))
    # A partition that was never saved is worse than any other.
    worst = np.iinfo(np.int64).max
    stale = np.where(staleness < 0, worst, staleness)
    cells = np.maximum.reduceat(stale, np.arange(0, count, per_cell)) if count else stale
    known = cells[cells != worst]
    top = int(known.max(initial=0))
    level = np.where(cells == worst, 0, cells) * len(LEVELS) // (top + 1)
    lines = []
    for first in range(0, len(cells), width):
        line = Text()
        for value, at in zip(
            cells[first : first + width].tolist(), level[first : first + width].tolist(), strict=True
        ):
            character, style = NEVER if value == worst else LEVELS[at]
            line.append(character, style=style)
        lines.append(line)
    legend = Text(f"staleness, {per_cell} partition{'s' if per_cell > 1 else ''} per cell: ")
    for k, (character, style) in enumerate(LEVELS):
        low, high = -(-k * (top + 1) // len(LEVELS)), -(-(k + 1) * (top + 1) // len(LEVELS)) - 1
        if low <= high:
            legend.append(character, style=style).append(
                f" {low}" if low == high else f" {low}-{high}"
            ).append("  ")
    if len(known) < len(cells):
        legend.append(NEVER[0], style=NEVER[1]).append(" never saved")
    return [*lines, legend]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for k, name in enumerate(columns):
        table.add_column(name, justify="left" if k == 0 and columns is PARTITION_COLUMNS else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return ["", table]
