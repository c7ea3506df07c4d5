"""Write pictures as SVG: documents, lines, text, and round distances between grid lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape


def picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Return a document with a white background."""
    size = f'width="{width:g}" height="{height:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {size} '
        f'font-family="sans-serif" font-size="11" fill="#222222">'
    )
    name = f"<title>{escape(title)}</title>"
    return "\n".join([head, name, f'<rect {size} fill="white"/>', *parts, "</svg>", ""])


def line(x1: float, y1: float, x2: float, y2: float, colour: str, extra: str = "") -> str:
    """Return a line. extra: further attributes."""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' {extra}/>"


def text(x: float, y: float, content: str, anchor: str = "start", extra: str = "") -> str:
    """Return a text at its baseline. anchor: "start", "middle" or "end". extra: further attributes."""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {extra}>{escape(content)}</text>"


def turned(y: float, content: str) -> str:
    """Return the name of a vertical axis, whose middle is at `y`."""
    return text(0, 0, content, "middle", f"transform='translate(14 {y:g}) rotate(-90)'")


def grid(
    low: float, step: float, count: int, left: float, right: float, top: float, bottom: float
) -> list[str]:
    """Return `count` + 1 horizontal lines from `low` on, `step` apart, from `bottom` up to `top`, with their values."""
    parts = []
    for k in range(count + 1):
        value, y = low + k * step, bottom - (bottom - top) * k / count
        parts.append(line(left, y, right, y, "#444444" if abs(value) < step / 2 else "#dddddd"))
        parts.append(text(left - 6, y + 4, f"{value:g}", "end"))
    return parts


def round_step(span: float) -> float:
    """Return a round distance between grid lines, for about five of them."""
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next((k * power for k in (1, 2, 5, 10) if span / (k * power) <= 6), 10 * power)
