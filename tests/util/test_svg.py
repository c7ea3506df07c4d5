"""Test pictures: well-formed documents, foreign text escaped, grid lines at round values."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from scarctl.util.svg import grid, line, picture, round_step, text, turned

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_is_well_formed_and_shows_text_as_it_is() -> None:
    parts = [
        *grid(-1.0, 0.5, 4, 50, 350, 30, 210),
        line(0, 1, 2, 3, "#0072b2"),
        text(5, 6, "a < b & c"),
        turned(9, "y"),
    ]
    root = ElementTree.fromstring(picture("<title>", 360, 260, parts))
    assert root.get("viewBox") == "0 0 360 260"
    assert [found.text for found in root.iter(f"{SVG}title")] == ["<title>"]
    texts = [found.text for found in root.iter(f"{SVG}text")]
    assert texts == ["-1", "-0.5", "0", "0.5", "1", "a < b & c", "y"]
    strokes = [found.get("stroke") for found in root.iter(f"{SVG}line")]
    assert strokes == ["#dddddd", "#dddddd", "#444444", "#dddddd", "#dddddd", "#0072b2"], "zero is darker"
    assert [found.get("y1") for found in root.iter(f"{SVG}line")][:5:4] == ["210.0", "30.0"]


@pytest.mark.parametrize(
    ("span", "step"), [(11, 2), (60, 10), (1, 0.2), (0.037, 0.01), (1e6, 200_000), (6, 1)]
)
def test_lines_are_at_round_numbers(span: float, step: float) -> None:
    assert round_step(span) == pytest.approx(step)
