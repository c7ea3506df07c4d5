"""Draw a study's result as SVG: rework over the fraction, a line per policy, a panel per lost share.

Written without a plotting library: a few kinds of marks are not worth a dependency of megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from scarctl.simulate.study import Study
from scarctl.simulate.summary import CellMeans, Summary
from scarctl.util.svg import grid, picture, round_step, text, turned
from scarctl.util.svg import line as stroke

# The marks differ, too, for readers who do not see the colours.
_STYLES = {"full": ("#444444", "circle"), "aged": ("#cc79a7", "circle"), "priority": ("#0072b2", "circle"),
           "round": ("#d55e00", "square"), "random": ("#009e73", "triangle")}  # fmt: skip
_WIDTH, _HEIGHT = 360.0, 260.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 34.0, 44.0
_LEGEND = 46.0


def draw(study: Study, summary: Summary) -> str:
    """Return the picture as an SVG document."""
    rollback = next((line for line in summary.cells if line.cell.mode == "rollback"), None)
    partial = [line for line in summary.cells if line.cell.mode != "rollback"]
    panels = (
        [[line for line in partial if line.cell.lost == lost] for lost in study.lost] if partial else [[]]
    )
    low, high = _range(summary.cells)
    parts = []
    for k, panel in enumerate(panels):
        title = f"{study.lost[k]} of the state lost" if partial else "rollback"
        parts += [
            f'<g transform="translate({k * _WIDTH:g} 0)">',
            *_panel(title, panel, rollback, low, high),
            "</g>",
        ]
    shown = [policy for policy in _STYLES if any(line.cell.policy == policy for line in partial)]
    parts += _legend(shown, rollback is not None, summary)
    width, height = max(1, len(panels)) * _WIDTH, _HEIGHT + _LEGEND
    return picture(f"{study.workload}: rework cost", width, height, parts)


def _range(lines: Iterable[CellMeans]) -> tuple[float, float]:
    ends = [value for line in lines for value in (line.rework.mean, line.rework.low, line.rework.high)]
    known = [value for value in ends if value is not None]
    low, high = min(0.0, *known), max(0.0, *known)
    return (low, high) if high > low else (0.0, 1.0)


def _panel(
    title: str, lines: list[CellMeans], rollback: CellMeans | None, low: float, high: float
) -> list[str]:
    step = round_step(high - low)
    low, high = step * (low // step), step * -(-high // step)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    right = _WIDTH - _RIGHT
    fractions = sorted({line.cell.fraction for line in lines}, reverse=True)

    def x(fraction: Fraction) -> float:
        return _LEFT + (right - _LEFT) * (fractions.index(fraction) + 0.5) / len(fractions)

    parts = [text(_WIDTH / 2, _TOP - 14, title, "middle", "font-weight='bold'")]
    parts += grid(low, step, round((high - low) / step), _LEFT, right, _TOP, _HEIGHT - _BOTTOM)
    parts.append(turned((_TOP + _HEIGHT - _BOTTOM) / 2, "rework, iterations"))
    for fraction in fractions:
        parts.append(text(x(fraction), _HEIGHT - _BOTTOM + 16, str(fraction), "middle"))
    parts.append(
        text(
            (_LEFT + right) / 2,
            _HEIGHT - _BOTTOM + 32,
            "saved by one checkpoint (same bytes per time)",
            "middle",
        )
    )
    if rollback is not None:
        at = y(rollback.rework.mean)
        parts.append(stroke(_LEFT, at, right, at, "#000000", "stroke-dasharray='6 4' stroke-width='1.5'"))
    policies = list(dict.fromkeys(line.cell.policy for line in lines if line.cell.policy != "full"))
    # Policies are shifted so that their intervals do not overlap. All begin at the full checkpoint.
    shifts = {policy: 5.0 * (k - (len(policies) - 1) / 2) for k, policy in enumerate(policies)} | {
        "full": 0.0
    }

    def place(line: CellMeans) -> tuple[float, float]:
        return x(line.cell.fraction) + shifts[line.cell.policy], y(line.rework.mean)

    full = [line for line in lines if line.cell.policy == "full"]
    for policy in policies:
        points = [place(line) for line in [*full, *lines] if line in full or line.cell.policy == policy]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in dict.fromkeys(points))
        parts.append(
            f"<polyline points='{path}' fill='none' stroke='{_STYLES[policy][0]}' stroke-width='1.5'/>"
        )
    for line in lines:
        (at, mean), (colour, mark) = place(line), _STYLES[line.cell.policy]
        if line.rework.low is not None and line.rework.high is not None:
            parts.append(stroke(at, y(line.rework.low), at, y(line.rework.high), colour))
        parts.append(_mark(at, mean, colour, mark))
    return parts


def _legend(policies: list[str], rollback: bool, summary: Summary) -> list[str]:
    parts, at, y = [], 14.0, _HEIGHT + 12
    for policy in policies:
        parts += [_mark(at, y - 4, *_STYLES[policy]), text(at + 9, y, policy)]
        at += 52
    if rollback:
        parts += [stroke(at, y - 4, at + 22, y - 4, "#000000", "stroke-dasharray='6 4' stroke-width='1.5'")]
        parts += [text(at + 28, y, "rollback")]
    note = f"{summary.trials} trials, bars are 95 % intervals of the mean"
    return [*parts, text(_LEFT, y + 20, note, extra="fill='#666666'")]


def _mark(x: float, y: float, colour: str, mark: str) -> str:
    if mark == "square":
        return f"<rect x='{x - 3.5:.1f}' y='{y - 3.5:.1f}' width='7' height='7' fill='{colour}'/>"
    if mark == "triangle":
        return f"<path d='M{x:.1f} {y - 5:.1f} l4.5 8 h-9 z' fill='{colour}'/>"
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.8' fill='{colour}'/>"
