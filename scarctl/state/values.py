"""Interpret stored bytes as numbers, including dtypes that numpy lacks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.state.raw_tensor import NUMPY
from scarctl.util.arrays import Bytes

# Booleans as numbers; real and imaginary parts as separate values, which is enough for a norm.
_NUMPY = {**NUMPY, "BOOL": "|u1", "C64": "<f4"}

# (exponent bits, mantissa bits, bias, encoding of infinity and NaN)
_FLOAT8 = {
    "F8_E5M2": (5, 2, 15, "ieee"),
    "F8_E4M3": (4, 3, 7, "all ones"),
    "F8_E5M2FNUZ": (5, 2, 16, "negative zero"),
    "F8_E4M3FNUZ": (4, 3, 8, "negative zero"),
}


def as_numbers(data: Bytes, dtype: str) -> NDArray[Any]:
    """Return bytes of the safetensors dtype `dtype` as real numbers of a numpy dtype: shape (values,).

    A complex value becomes two numbers.
    """
    flat = np.ascontiguousarray(data).reshape(-1)
    if dtype == "BF16":
        return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in _NUMPY:
        return flat.view(_NUMPY[dtype])
    numbers: NDArray[Any] = _table(dtype)[flat]
    return numbers


def squared_changes(
    before: Bytes, after: Bytes, dtype: str, row_counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the squared norm of (after - before) per partition: float64 (partitions,), NaN where it is not finite.

    `before` and `after` are uint8 of shape (rows, bytes per row). Partition i is the next `row_counts[i]` rows.
    """
    rows = len(after)
    per_row = np.zeros(rows)
    row_bytes = after.shape[1]
    step = max(1, (1 << 20) // max(1, row_bytes))
    with np.errstate(all="ignore"):
        for first in range(0, rows if row_bytes else 0, step):
            part = slice(first, first + step)
            then, now = (as_numbers(rows[part], dtype).astype(np.float64) for rows in (before, after))
            change = now - then
            if not np.isfinite(change).all():
                change[now == then] = 0.0  # equal infinities have not changed
            change = change.reshape(len(after[part]), -1)
            per_row[part] = np.einsum("ij,ij->i", change, change)
        starts = np.concatenate(([0], np.cumsum(row_counts)[:-1])).astype(np.int64)
        sums = np.add.reduceat(per_row, starts) if rows else np.zeros(len(row_counts))
    return np.where(np.isfinite(sums), sums, np.nan)


@cache
def _table(dtype: str) -> NDArray[np.float32]:
    """Return the 256 values of an 8-bit float."""
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        values = np.exp2(codes - 127.0)
        values[255] = np.nan
        return np.asarray(values, dtype=np.float32)
    exponent_bits, mantissa_bits, bias, special = _FLOAT8[dtype]
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.exp2(exponent - float(bias)) * (1 + mantissa)
    values = np.where(exponent == 0, np.exp2(1.0 - bias) * mantissa, normal)
    values[codes >= 128] *= -1
    if special == "ieee":
        top = exponent == (1 << exponent_bits) - 1
        values[top & (mantissa > 0)] = np.nan
        values[top & (mantissa == 0)] *= np.inf
    elif special == "all ones":
        values[(codes & 127) == 127] = np.nan
    else:
        values[128] = np.nan
    return np.asarray(values, dtype=np.float32)
