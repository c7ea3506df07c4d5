"""Render an SVG picture as PNG with resvg (the extra `png`), which needs no system library, only a font."""

from __future__ import annotations

from scarctl.errors import UsageError

ZOOM = 2
"""Pixels per unit of the picture."""
# resvg has no default font for "sans-serif". One of these is installed nearly everywhere.
_FAMILIES = ("Arial", "Helvetica", "DejaVu Sans", "Liberation Sans", "Noto Sans", "FreeSans", "Open Sans", "Roboto",
             "Ubuntu", "Cantarell")  # fmt: skip
_PROBE = "<svg xmlns='http://www.w3.org/2000/svg' width='20' height='20' font-family='sans-serif'>{}</svg>"


def check() -> None:
    """Raise UsageError unless resvg and one of the fonts are installed."""
    _family()


def render(svg: str) -> bytes:
    """Return the picture as PNG, `ZOOM` pixels per unit. Raises UsageError as `check` does."""
    family = _family()
    from resvg_py import svg_to_bytes

    return svg_to_bytes(svg_string=svg, zoom=ZOOM, sans_serif_family=family)


def _family() -> str:
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError:
        raise UsageError(
            "PNG pictures need resvg, which is not installed",
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
