"""Encode copies of parameters and their optimizer slots in fewer bits, and decode them again.

    bfloat16   float32 values are rounded to bfloat16
    int8       float32, float16 and bfloat16 values are 8-bit multiples of a float32 scale, one scale for each row

All else stays exact: buffers, integers, float64, and rows so short that an encoding would leave more than 5/8 of their
bytes. In "int8" a slot's row without negative values holds square roots, rounded up, and its scale is negative: a
second moment of Adam never comes back smaller than it was, so no step becomes longer. A row with a value that is not
finite has the scale NaN, and all of it comes back as NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.state.encodings import Encoding
from scarctl.state.group import DTYPES, Group, TensorSpec
from scarctl.state.layout import Layout
from scarctl.util.arrays import Bytes

_SCALE = "scarctl-scale"
_DTYPE: dict[Encoding, str] = {"bfloat16": "BF16", "int8": "I8"}
_ENCODED: dict[Encoding, tuple[str, ...]] = {
    "exact": (),
    "bfloat16": ("F32",),
    "int8": ("F32", "F16", "BF16"),
}
_CHUNK = 1 << 16
"""Values that are encoded at once, so that temporary arrays stay in the cache."""
_NAN, _LARGEST = np.uint16(0x40), np.uint16(0x7F7F)

_MOST, _HUGE = np.finfo(np.float32).max, np.float32(1e16)

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an encoded group."""

    of: int
    """The live tensor, by its number in the group."""
    encoding: Encoding
    is_scale: bool = False
    """Whether the tensor has the scales of the live tensor's rows."""


@functools.lru_cache(maxsize=16)
def stored_as(layout: Layout, encoding: Encoding) -> Layout:
    """Return the layout of encoded data: the same groups and partitions, with other dtypes, and with scales.

    Raises UsageError if a tensor's name is that of a scale.
    """
    if encoding == "exact":
        return layout
    return Layout([_encoded(group, encoding) for group in layout.groups], layout.optimizer)


@functools.lru_cache(maxsize=16)
def encoded_groups(layout: Layout, encoding: Encoding) -> NDArray[np.bool_]:
    """Return which groups have a tensor that is not stored exactly: bool (groups,)."""
    stored = stored_as(layout, encoding).groups
    return np.array([mine != there for mine, there in zip(layout.groups, stored, strict=True)], dtype=bool)


def _encoded(group: Group, encoding: Encoding) -> Group:
    tensors: list[TensorSpec] = []
    for part in parts(group, encoding):
        spec = group.tensors[part.of]
        if part.is_scale:
            slot = f"{spec.slot}.{_SCALE}" if spec.slot else _SCALE
            tensors.append(TensorSpec(slot, "F32", (spec.rows,)))
        else:
            tensors.append(spec if part.encoding == "exact" else replace(spec, dtype=_DTYPE[part.encoding]))
    return replace(group, tensors=tuple(tensors))


def parts(group: Group, encoding: Encoding) -> list[Part]:
    """Return the tensors of the encoded group, in order: the live ones, then scales."""
    found = [Part(t, _kind(group, spec, encoding)) for t, spec in enumerate(group.tensors)]
    return found + [Part(part.of, "int8", is_scale=True) for part in found if part.encoding == "int8"]


def _kind(group: Group, spec: TensorSpec, encoding: Encoding) -> Encoding:
    """Return how a tensor is encoded. A group without bytes stays so: it has no partitions."""
    if group.kind != "parameter" or spec.dtype not in _ENCODED[encoding]:
        return "exact"
    values = math.prod(spec.shape[1:])
    nbytes = 2 * values if encoding == "bfloat16" else values + 4
    return encoding if 0 < 8 * nbytes <= 5 * spec.row_bytes else "exact"


def encode(data: Bytes, spec: TensorSpec, part: Part) -> Bytes:
    """Return rows of a live tensor as `part` stores them.

    data: the rows' bytes, C-contiguous. spec: the live tensor.
    """
    if part.encoding == "exact" or not data.size:
        return data
    values = data.size // DTYPES[spec.dtype]
    width = math.prod(spec.shape[1:])
    rows = values // width
    step = max(1, _CHUNK // width)
    pieces = data.reshape(rows, -1)
    if part.encoding == "bfloat16":
        rounded = np.empty(rows * width, np.uint16)
        words = data.view(np.uint32)
        for a in range(0, words.size, _CHUNK):
            rounded[a : a + _CHUNK] = _to_bfloat16(words[a : a + _CHUNK])
        return rounded.view(np.uint8)
    scales, codes = np.empty(rows, np.float32), np.empty((0 if part.is_scale else rows, width), np.int8)
    for a in range(0, rows, step):
        floats = _floats(pieces[a : a + step].reshape(-1), spec.dtype).reshape(-1, width)
        scales[a : a + step] = scale = _scales(floats, roots=bool(spec.slot))
        if not part.is_scale:
            codes[a : a + step] = _codes(floats, scale)
    return (scales if part.is_scale else codes.reshape(-1)).view(np.uint8)


def decode(group: Group, encoding: Encoding, stored: Sequence[Bytes]) -> list[Bytes]:
    """Return the bytes of rows of a group's live tensors. stored: the bytes of each tensor of the encoded group."""
    found: list[Bytes] = []
    tensors = parts(group, encoding)
    scale_of = {part.of: stored[t] for t, part in enumerate(tensors) if part.is_scale}
    for part, data in zip(tensors, stored, strict=True):
        if part.is_scale:
            continue
        spec = group.tensors[part.of]
        if part.encoding == "bfloat16":
            data = _from_bfloat16(data.view(np.uint16)).view(np.uint8)
        elif part.encoding == "int8":
            data = _decode_int8(data, scale_of[part.of], spec)
        found.append(data)
    return found


def squared_errors(data: Bytes, decoded: Bytes, dtype: str, count: int) -> NDArray[np.float64]:
    """Return the squared error of each of `count` pieces of equal length: float64 (count,); infinite if not finite."""
    found = np.zeros(count)
    if not data.size:
        return found
    live, back = data.reshape(count, -1), decoded.reshape(count, -1)
    step = max(1, _CHUNK * DTYPES[dtype] // live.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):
        for a in range(0, count, step):
            error = _floats(live[a : a + step].reshape(-1), dtype).astype(np.float64)
            error -= _floats(back[a : a + step].reshape(-1), dtype)
            error = error.reshape(len(live[a : a + step]), -1)
            found[a : a + step] = np.einsum("ij,ij->i", error, error)
    found[~np.isfinite(found)] = np.inf
    return found


def _floats(data: Bytes, dtype: str) -> Floats:
    """Return values of one of the three dtypes that are encoded, as float32."""
    if dtype == "BF16":
        return _from_bfloat16(data.view(np.uint16))
    if dtype == "F16":
        return data.view(np.float16).astype(np.float32)
    return data.view(np.float32)


def _to_bfloat16(words: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Round the bits of float32 to those of bfloat16, ties to even. What is finite stays finite."""
    found = (
        (words + (np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    ).astype(np.uint16)
    special = (words & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    overflown = (found & np.uint16(0x7F80)) == np.uint16(0x7F80)
    if special.any() or overflown.any():
        upper = (words >> np.uint32(16)).astype(np.uint16)
        nan = special & ((words & np.uint32(0x7FFFFF)) != 0)
        found[overflown] = (upper[overflown] & np.uint16(0x8000)) | _LARGEST
        found[special] = upper[special]
        found[nan] = upper[nan] | _NAN
    return found


def _from_bfloat16(upper: NDArray[np.uint16]) -> Floats:
    return (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scales(rows: Floats, *, roots: bool) -> Floats:
    """Return the scale of each row; negative where its codes are of square roots."""
    low, high = rows.min(1), rows.max(1)
    scale: Floats = np.maximum(high, -low) / np.float32(127)
    if roots:
        with np.errstate(invalid="ignore"):
            scale = np.where(low >= 0, np.sqrt(high) / np.float32(-255), scale)
    scale[~np.isfinite(scale)] = np.nan
    return scale


def _codes(rows: Floats, scale: Floats) -> NDArray[np.int8]:
    codes = np.empty(rows.shape, np.int8)
    safe = np.where(scale == 0, np.float32(1), scale)
    linear = scale >= 0
    if linear.all():
        scaled = rows / safe[:, None]
        return np.clip(np.rint(scaled, out=scaled), -127, 127, out=scaled).astype(np.int8)
    codes[linear] = np.clip(np.rint(rows[linear] / safe[linear, None]), -127, 127).astype(np.int8)
    root = scale < 0
    scaled = np.ceil(np.sqrt(rows[root]) / -safe[root, None])
    codes[root] = np.clip(scaled, 0, 255).astype(np.uint8).view(np.int8)
    codes[np.isnan(scale)] = 0
    return codes


def _decode_int8(data: Bytes, scales: Bytes, spec: TensorSpec) -> Bytes:
    width = math.prod(spec.shape[1:])
    codes, scale = data.view(np.int8).reshape(-1, width), scales.view(np.float32)
    found = np.empty(codes.size * DTYPES[spec.dtype], np.uint8)
    out = found.reshape(len(codes), -1)
    step = max(1, _CHUNK // width)
    with np.errstate(over="ignore", invalid="ignore"):
        for a in range(0, len(codes), step):
            part, by = codes[a : a + step], scale[a : a + step, None]
            floats = part.astype(np.float32)
            if (by < 0).any():
                root = by[:, 0] < 0
                floats[root] = part[root].view(np.uint8)
                floats *= by
                floats[root] = np.square(floats[root])
            else:
                floats *= by
            if (np.abs(by) > _HUGE).any():  # rounding may have gone beyond the largest value
                np.clip(floats, -_MOST, _MOST, out=floats)
            out[a : a + step] = _as_dtype(floats, spec.dtype).reshape(len(part), -1)
    return found


def _as_dtype(floats: Floats, dtype: str) -> Bytes:
    if dtype == "BF16":
        return _to_bfloat16(floats.reshape(-1).view(np.uint32)).view(np.uint8)
    if dtype == "F16":
        return floats.astype(np.float16).reshape(-1).view(np.uint8)
    return floats.reshape(-1).view(np.uint8)
