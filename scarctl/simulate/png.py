"""An SVG picture as PNG, by resvg: the extra `png`. It needs no library of the system, only one of its fonts."""

from __future__ import annotations

from scarctl.errors import UsageError

ZOOM = 2
"""Pixels for each of the picture's units."""
# resvg takes no font's place by another: what "sans-serif" is has to be said. One of these is nearly everywhere.
_FAMILIES = ("Arial", "Helvetica", "DejaVu Sans", "Liberation Sans", "Noto Sans", "FreeSans", "Open Sans", "Roboto",
             "Ubuntu", "Cantarell")  # fmt: skip
_PROBE = "<svg xmlns='http://www.w3.org/2000/svg' width='20' height='20' font-family='sans-serif'>{}</svg>"


def check() -> None:
    """Raise UsageError unless a picture can be drawn here: resvg is installed, and there is a font for its words."""
    _family()


def render(svg: str) -> bytes:
    """The picture. Raises UsageError as `check` does."""
    family = _family()
    from resvg_py import svg_to_bytes

    return svg_to_bytes(svg_string=svg, zoom=ZOOM, sans_serif_family=family)


def _family() -> str:
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError:
        raise UsageError(
            "PNG pictures are drawn by resvg, which is not installed",
            hint="pip install 'scarctl[png]', or give a name that ends in .svg",
            kind="no-png",
        ) from None
    nothing = svg_to_bytes(svg_string=_PROBE.format(""))
    for family in _FAMILIES:
        probe = _PROBE.format("<text x='2' y='15'>0</text>")
        if svg_to_bytes(svg_string=probe, sans_serif_family=family) != nothing:
            return family
    raise UsageError(
        f"none of these fonts is installed: {', '.join(_FAMILIES)}",
        hint="install one, such as DejaVu Sans, or give a name that ends in .svg",
        kind="no-png",
    )
