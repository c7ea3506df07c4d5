"""Place the tensors of a safetensors file, and parse its header.

The parser accepts hostile input: sizes are limited before parsing, shapes are multiplied as Python integers and never
allocated, and every failure is a `Corruption` that names the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scarctl.state.layout import DTYPES
from scarctl.store.format import corrupt, parse_json

MAX_HEADER = 64 << 20
_KEYS, _SIZES = {"dtype", "shape", "data_offsets"}, range(1 << 62)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file. `start` and `stop` are byte offsets in the file, not in its data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict[str, str]
    tensors: dict[str, Entry]
    length: int
    """Bytes of the length word and the header, which is the offset of the data."""

    def entry(self, name: str, dtype: str, shape: tuple[int, ...], what: object) -> Entry:
        """Return the tensor `name`, which must have this dtype and shape. A first length of -1 stands for any."""
        found = self.tensors.get(name)
        if found is None:
            raise corrupt(what, f"tensor {name!r} is missing")
        rest = found.shape[:1] and found.shape[1:] == shape[1:] and shape[:1] == (-1,)
        same = found.shape == shape or rest
        if found.dtype != dtype or not same:
            raise corrupt(
                what, f"tensor {name!r} is {found.dtype}{list(found.shape)}, expected {dtype}{list(shape)}"
            )
        return found


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor, as an exact integer."""
    return DTYPES[dtype] * math.prod(shape)


def place_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[Header, bytes]:
    """Place `(name, dtype, shape)` one after another. Return the header, and its bytes, padded to a multiple of 8."""
    placed: list[tuple[str, str, tuple[int, ...], int, int]] = []
    offset = 0
    for name, dtype, shape in tensors:
        size = nbytes(dtype, shape)
        placed.append((name, dtype, tuple(shape), offset, offset + size))
        offset += size
    obj: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, dtype, shape, start, stop in placed:
        obj[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    text = json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    length = len(text)
    entries = {
        name: Entry(dtype, shape, start + length, stop + length) for name, dtype, shape, start, stop in placed
    }
    return Header(dict(metadata), entries, length), text


def header_length(prefix: bytes, file_size: int, what: object) -> int:
    """Return the bytes of length word and header, from a file's first 8 bytes. Raises Corruption if too large."""
    if len(prefix) < 8:
        raise corrupt(what, "too short to be a safetensors file")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER:
        raise corrupt(what, f"its header claims {length} bytes, more than the limit of {MAX_HEADER}")
    if 8 + length > file_size:
        raise corrupt(what, f"its header claims {length} bytes, but the file has {file_size}")
    return 8 + length


def parse_header(data: bytes, file_size: int, what: object) -> Header:
    """Parse length word and header (`data`, exactly). The tensors must fill the rest of the file without holes."""
    length = header_length(data, file_size, what)
    if len(data) != length:
        raise corrupt(what, "its header is truncated")
    obj = parse_json(data[8:], what)
    if not isinstance(obj, dict):
        raise corrupt(what, "its header is not an object")
    metadata = obj.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise corrupt(what, "its metadata are not texts")
    tensors = {name: _entry(name, value, length, what) for name, value in obj.items()}
    end = length
    for start, stop in sorted((e.start, e.stop) for e in tensors.values()):
        if start != end:
            raise corrupt(what, f"its tensors overlap or leave a hole at byte {min(start, end)}")
        end = stop
    if end != file_size:
        raise corrupt(what, f"its tensors end at byte {end}, but the file has {file_size}")
    return Header(metadata, tensors, length)


def _entry(name: str, value: object, base: int, what: object) -> Entry:
    if not isinstance(value, dict) or value.keys() != _KEYS:
        raise corrupt(what, f"tensor {name!r} has a malformed entry")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise corrupt(what, f"tensor {name!r} has unknown dtype {dtype!r:.40}")
    if not _sizes(shape) or len(shape) > 64:
        raise corrupt(what, f"tensor {name!r} has a malformed shape")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(what, f"tensor {name!r} has malformed offsets")
    if nbytes(dtype, shape) != offsets[1] - offsets[0]:
        raise corrupt(what, f"tensor {name!r} has a shape that does not fit its length")
    return Entry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int} and all(map(_SIZES.__contains__, value))
