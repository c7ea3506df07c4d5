"""Draw the paper's pictures that `scarctl.simulate.chart` does not: points and bounds, shares, timelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scarctl.util.svg import grid, line, picture, round_step, text, turned

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#444444")
WIDTH, HEIGHT = 360.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 32.0, 42.0


@dataclass
class Series:
    """Points, or a line through them. A point may have an interval."""

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = False
    dashed: bool = False
    colour: str = COLOURS[0]
    intervals: Sequence[tuple[float | None, float | None]] = ()


@dataclass
class Panel:
    """One pair of axes."""

    title: str
    across: str
    up: str
    series: list[Series]
    logarithmic: bool = False
    """Whether the horizontal axis is logarithmic."""
    ticks: dict[float, str] = field(default_factory=dict)
    """Marks of the horizontal axis with their texts; {}: at round numbers."""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the panels side by side, an SVG document. The legend is that of the first."""
    width = len(panels) * WIDTH
    legend, at, row = [], LEFT, 0
    for series in panels[0].series:
        needs = 40 + 6.2 * len(series.name)
        if at > LEFT and at + needs > width:
            at, row = LEFT, row + 1
        y = HEIGHT + 8 + 16 * row
        legend.append(_shape([(at, y), (at + 18, y)] if series.line else [(at + 9, y)], series))
        legend.append(text(at + 24, y + 4, series.name))
        at += needs
    height = HEIGHT + 22 + 16 * row
    parts = list(legend)
    for k, panel in enumerate(panels):
        parts += [f'<g transform="translate({k * WIDTH:g} 0)">', *_panel(panel), "</g>"]
    return picture(title, width, height, parts)


def _panel(panel: Panel) -> list[str]:
    xs = [x for series in panel.series for x, _ in series.points]
    ys = [y for series in panel.series for _, y in series.points if math.isfinite(y)]
    ys += [end for series in panel.series for pair in series.intervals for end in pair if end is not None]
    scale = math.log10 if panel.logarithmic else float
    left, right = (scale(end) for end in (min(xs), max(xs)))
    pad = 0.04 * (right - left) or 1.0
    left, right = left - pad, right + pad
    step = round_step(max([*ys, 0.0]) - min([*ys, 0.0]) or 1.0)
    low, high = step * math.floor(min([*ys, 0.0]) / step), step * math.ceil(max([*ys, 0.0]) / step)
    high = high if high > low else low + step

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (scale(point[0]) - left) / (right - left)
        up = (min(max(point[1], low), high) - low) / (high - low)
        return LEFT + (WIDTH - LEFT - RIGHT) * across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up

    parts = [text((LEFT + WIDTH) / 2, TOP - 14, panel.title, "middle", "font-weight='bold'")]
    parts += grid(low, step, round((high - low) / step), LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    for value, name in (panel.ticks or _ticks(left, right, panel.logarithmic)).items():
        parts.append(text(place((value, 0.0))[0], HEIGHT - BOTTOM + 15, name, "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 31, panel.across, "middle"))
    parts.append(turned((TOP + HEIGHT - BOTTOM) / 2, panel.up))
    for series in panel.series:
        for point, (bottom, top) in zip(series.points, series.intervals, strict=False):
            if bottom is not None and top is not None:
                (x, y1), (_, y2) = place((point[0], bottom)), place((point[0], top))
                parts.append(line(x, y1, x, y2, series.colour))
        parts.append(_shape([place(point) for point in series.points if math.isfinite(point[1])], series))
    return parts


def _shape(places: Sequence[tuple[float, float]], series: Series) -> str:
    if series.line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = "stroke-dasharray='6 4'" if series.dashed else ""
        return f"<polyline points='{path}' fill='none' stroke='{series.colour}' stroke-width='1.5' {dashes}/>"
    # Dots are strokes without a length: a thousand of them are short to write.
    width = 7 if len(places) < 50 else 3
    path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    return f"<path d='{path}' stroke='{series.colour}' stroke-width='{width}' stroke-linecap='round'/>"


def _ticks(left: float, right: float, logarithmic: bool) -> dict[float, str]:
    if logarithmic:
        step = max(1, math.ceil((right - left) / 5))
        powers = range(math.ceil(left), math.floor(right) + 1, step)
        return {10.0**k: f"{10.0**k:g}" if abs(k) < 4 else f"1e{k}" for k in powers}
    step_size = round_step(right - left)
    first = math.ceil(left / step_size)
    return {k * step_size: f"{k * step_size:g}" for k in range(first, math.floor(right / step_size) + 1)}
