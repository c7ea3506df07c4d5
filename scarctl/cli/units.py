"""Parse sizes and times with a unit, and answer in the same unit."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from scarctl.config import parse_bytes
from scarctl.errors import UsageError

_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*(\d*\.?\d*(?:e[+-]?\d+)?)\s*(ms|min|s|m|h|d|)\s*", re.IGNORECASE | re.ASCII)
_SIZE = re.compile(r"\s*(\S*?\d\.?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)


class Given(float):
    """A number of bytes or seconds. `text` is the number in the unit that was given, such as "120 GB"; "" without."""

    text: str

    def __new__(cls, value: float, text: str = "") -> Given:
        """Return the number `value`, given as `text`."""
        number = super().__new__(cls, value)
        number.text = text
        return number


class Size(click.ParamType[Any]):
    """A number of bytes, at least 1: 4096, 4KB (4000), 4KiB (4096), 1.5GB."""

    name = "size"

    def __init__(self, *, per_second: bool = False) -> None:
        self._per_second = per_second

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Given:
        """Return the bytes. Fails with a usage error."""
        if isinstance(value, Given):
            return value
        given = re.sub(r"/s\s*$", "", str(value)) if self._per_second else str(value)
        try:
            number = parse_bytes(given)
        except UsageError:
            number = 0
        if number < 1:
            self.fail(
                f"{value!r} is not a number of bytes above 0, such as 4096, 800MiB or 1.5GB", param, ctx
            )
        return Given(number, _with_unit(given))


class WholeSize(Size):
    """A number of bytes like `Size`, as an int."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the bytes, rounded down. Fails with a usage error."""
        return int(super().convert(value, param, ctx))


class Time(click.ParamType[Any]):
    """A finite time in seconds: 0.5, 90s, 30m, 6h, 2d. zero: 0 is allowed."""

    name = "time"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Given:
        """Return the seconds. Fails with a usage error."""
        if isinstance(value, Given):
            return value
        match = _TIME.fullmatch(str(value))
        try:
            number = float(match[1]) if match else math.nan
        except ValueError:
            number = math.nan
        if match is None or not (0 <= number < math.inf) or (number == 0 and not self._zero):
            self.fail(f"{value!r} is not a time, such as 0.5, 90s, 30m, 6h or 2d", param, ctx)
        unit = match[2].lower()
        shown = f"{match[1]} {'min' if unit == 'm' else unit}" if unit else ""
        return Given(number * _TIMES[unit], shown)


def _with_unit(text: str) -> str:
    """Return "120 GB" for "120gb", "" without a unit."""
    match = _SIZE.fullmatch(text)
    if match is None or not match[2]:
        return ""
    prefix = match[2].upper() if match[3] or match[2].lower() != "k" else "k"
    return f"{match[1]} {prefix}{'i' if match[3] else ''}B"
