"""Measure values of any dtype: norms that neither overflow nor vanish, and counts of values that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.formats.source import Source, blocks
from scarctl.state.group import DTYPES
from scarctl.state.values import as_numbers
from scarctl.util.arrays import Bytes

_SAFE = (1e-140, 1e140)
"""Magnitudes whose squares, summed over a block, neither vanish nor overflow."""


@dataclass(slots=True)
class Values:
    """Measurements of a tensor's values. Norm, least and greatest are over the finite ones."""

    nan: int = 0
    inf: int = 0
    norm: float = 0.0
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a document. A norm that is too large for JSON is None."""
        norm = self.norm if math.isfinite(self.norm) else None
        return {"nan": self.nan, "inf": self.inf, "norm": norm, "min": self.low, "max": self.high}


def measure(source: Source, name: str) -> Values:
    """Read a tensor in blocks and measure it. Raises what `Source.read` does."""
    spec, found = source.specs[name], Values()
    size = DTYPES[spec.dtype]
    for start, stop in blocks(spec):
        values = numbers_of(source.read(name, start * size, stop * size), spec.dtype)
        if is_float(spec.dtype):
            finite = np.isfinite(values)
            if not finite.all():
                nan, inf = count_not_finite(values)
                found.nan += nan
                found.inf += inf
                values = values[finite]
        found.norm = join_norms(found.norm, norm_of(values))
        if values.size:
            low, high = float(values.min()), float(values.max())
            found.low = low if found.low is None else min(found.low, low)
            found.high = high if found.high is None else max(found.high, high)
    return found


def is_float(dtype: str) -> bool:
    """Return whether values of a safetensors dtype may be infinite or NaN."""
    return dtype.startswith(("F", "BF", "C"))


def numbers_of(data: Bytes, dtype: str) -> NDArray[Any]:
    """Return values as numbers whose differences are exact: float64, or longdouble for integers of 64 bits."""
    numbers = as_numbers(data, dtype)
    return numbers.astype(
        np.longdouble if numbers.dtype.kind in "iu" and numbers.itemsize == 8 else np.float64
    )


def count_not_finite(values: NDArray[Any], *, except_in: NDArray[Any] | None = None) -> tuple[int, int]:
    """Count values that are NaN, and values that are infinite, except where `except_in` has the same."""
    nan, inf = np.isnan(values), np.isinf(values)
    if except_in is not None:
        nan, inf = nan & ~np.isnan(except_in), inf & ~np.isinf(except_in)
    return int(np.count_nonzero(nan)), int(np.count_nonzero(inf))


def norm_of(values: NDArray[Any]) -> float:
    """Return the Euclidean norm of finite values."""
    if not values.size:
        return 0.0
    largest = float(max(values.max(), -values.min()))
    if not largest or not math.isfinite(largest):
        return largest
    # Not a product of BLAS, which would start threads.
    if _SAFE[0] < largest < _SAFE[1]:
        return math.sqrt(float(np.einsum("i,i->", values, values)))
    scaled = values / largest
    return largest * math.sqrt(float(np.einsum("i,i->", scaled, scaled)))


def join_norms(one: float, other: float) -> float:
    """Return the norm of two sets of values from their norms."""
    return math.hypot(one, other)
