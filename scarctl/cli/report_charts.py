"""Draw a report's pictures as SVG. The colours are those of the page's style sheet, for light and dark."""

from __future__ import annotations

import datetime
import math
from bisect import bisect_left
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scarctl.ops.timeline import Timeline
from scarctl.store.saved import parse
from scarctl.util.svg import round_step
from scarctl.util.text import printable

_WIDTH = 860.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 12.0, 12.0, 40.0
_HEIGHT = 240.0
_ROW = 15.0
MOST_ROWS = 40
"""Layers that the map of layers shows."""
MOST_CELLS = 2_000
"""Cells of the map of partitions."""
LEVELS = 5
"""Classes of colour in a map: the style sheet has `l0` to `l4`, and `never`."""


def text(content: object) -> str:
    """Return foreign text for HTML: control characters visible, markup escaped."""
    return escape(printable(str(content)), quote=True)


class Line(NamedTuple):
    """A line over time."""

    name: str
    """Class in the style sheet: "newest", "median" or "oldest"."""
    label: str
    steps: Sequence[float]


class Mark(NamedTuple):
    """A moment in the life of a run."""

    seconds: float
    """Unix time."""
    failure: bool
    told: str


def steps_over_time(seconds: Sequence[float], lines: Sequence[Line], marks: Sequence[Mark]) -> str:
    """Draw steps over time, a line each, with a band between the first and the last line.

    seconds: Unix times, ascending; one for each step of a line.
    """
    low, high = seconds[0], seconds[-1]
    # Records have times of whole seconds: a short history is drawn value by value.
    by_clock = high - low >= len(seconds) / 2
    span = max(high - low, 1.0) if by_clock else max(len(seconds) - 1.0, 1.0)
    bottom = max(0.0, min(min(line.steps) for line in lines))
    top = max(bottom + 1, *(max(line.steps) for line in lines))

    def x(at: float) -> float:
        place = at - low if by_clock else float(bisect_left(seconds, at))
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(place, span) / span

    def y(step: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (max(step, bottom) - bottom) / (top - bottom))

    parts = []
    for value in _ticks(bottom, top):
        at = f"y1='{y(value):.1f}' y2='{y(value):.1f}'"
        parts.append(f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' {at}/>")
        parts.append(_label(_LEFT - 6, y(value) + 4, f"{value:g}", "end"))
    parts.append(_label(_LEFT, _HEIGHT - _BOTTOM + 16, clock(low), "start"))
    parts.append(_label(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 16, clock(high), "end"))
    for mark in marks:
        if low <= mark.seconds <= high:
            at = f"x1='{x(mark.seconds):.1f}' x2='{x(mark.seconds):.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM}'"
            title = f"<title>{text(f'{clock(mark.seconds)}: {mark.told}')}</title>"
            parts.append(f"<line class='{'failure' if mark.failure else 'start'}' {at}>{title}</line>")
    places = [
        x(at) if by_clock else x(seconds[0]) + (_WIDTH - _LEFT - _RIGHT) * k / span
        for k, at in enumerate(seconds)
    ]
    drawn = [
        [f"{px:.1f},{y(step):.1f}" for px, step in zip(places, line.steps, strict=True)] for line in lines
    ]
    parts.append(f"<polygon class='band' points='{' '.join([*drawn[0], *reversed(drawn[-1])])}'/>")
    for line, points in zip(lines, drawn, strict=True):
        parts.append(f"<polyline class='{line.name}' points='{' '.join(points)}'/>")
    return _svg(_WIDTH, _HEIGHT, "Steps over time", parts)


def layers_over_time(timeline: Timeline) -> str:
    """Draw how much of each layer was saved in each span of time. At most `MOST_ROWS` layers, those saved most."""
    rows = sorted(range(len(timeline.layers)), key=lambda k: -sum(timeline.saved[k]))[:MOST_ROWS]
    rows.sort()
    left, columns = 200.0, len(timeline.spans)
    width = (_WIDTH - left - _RIGHT) / columns
    top = max((max(timeline.saved[k]) for k in rows), default=0.0) or 1.0
    parts = []
    for n, k in enumerate(rows):
        name = printable(timeline.layers[k])
        shown = name if len(name) <= 30 else "…" + name[-29:]
        parts.append(_label(left - 8, n * _ROW + 12, shown, "end"))
        for c, share in enumerate(timeline.saved[k]):
            level = min(LEVELS - 1, int(share / top * LEVELS)) if share else None
            if level is not None:
                title = f"{name}: {share:.0%} saved from {clock(timeline.spans[c])}"
                parts.append(
                    f"<rect class='l{level}' x='{left + c * width:.1f}' y='{n * _ROW + 1:.1f}' width='{width:.2f}' "
                    f"height='{_ROW - 2:.1f}'><title>{escape(title)}</title></rect>"
                )
    bottom = len(rows) * _ROW + 16
    parts.append(_label(left, bottom, clock(timeline.spans[0]), "start"))
    parts.append(_label(_WIDTH - _RIGHT, bottom, clock(timeline.spans[-1]), "end"))
    return _svg(_WIDTH, bottom + 8, "Saved layers over time", parts)


def ages(staleness: NDArray[np.int64]) -> str:
    """Draw a map of all partitions in order, one cell per bucket of them, coloured by the stalest of its bucket.

    staleness: int64 of shape (partitions,), in iterations, -1 never saved.
    """
    per_cell = max(1, -(-len(staleness) // MOST_CELLS))
    worst = np.iinfo(np.int64).max
    values = np.where(staleness < 0, worst, staleness)
    cells = np.maximum.reduceat(values, np.arange(0, len(values), per_cell))
    known = cells[cells != worst]
    top = int(known.max(initial=0))
    across = min(len(cells), 80)
    size = _WIDTH / max(across, 20)
    parts = []
    for k, value in enumerate(cells.tolist()):
        name = "never" if value == worst else f"l{value * LEVELS // (top + 1)}"
        told = "never saved" if value == worst else f"{value} iterations"
        parts.append(
            f"<rect class='{name}' x='{k % across * size:.1f}' y='{k // across * size:.1f}' width='{size - 1:.1f}' "
            f"height='{size - 1:.1f}'><title>partitions {k * per_cell} to "
            f"{min(len(staleness), (k + 1) * per_cell) - 1}: {told}</title></rect>"
        )
    return _svg(_WIDTH, -(-len(cells) // across) * size, "Ages of all partitions", parts)


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f"<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{title}'><title>{title}</title>"
        f"{''.join(parts)}</svg>"
    )


def _label(x: float, y: float, content: str, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{text(content)}</text>"


def clock(at: str | float) -> str:
    """Return a time for display, in UTC. at: in ISO 8601, or Unix time."""
    if isinstance(at, str):
        moment = parse(at)
        return "time unknown" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"
    try:
        return f"{datetime.datetime.fromtimestamp(at, datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "time unknown"


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values from `low` to `high`."""
    step = max(1.0, round_step(high - low))
    return [k * step for k in range(math.ceil(low / step), int(high / step) + 1)]
