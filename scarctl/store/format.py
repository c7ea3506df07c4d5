"""Define names, limits, canonical JSON and the safetensors header: all of the format that needs no file.

All parsers accept hostile input: sizes are limited before parsing, shapes are multiplied as Python integers and never
allocated, and every failure is a `Corruption` that names the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from scarctl.errors import Corruption
from scarctl.state.layout import DTYPES
from scarctl.util.json_size import MAX_CONTAINERS, MAX_VALUES, too_much

FORMAT = 1
MIXED_FORMAT = 2
ONE_LOG_FORMAT = 3
ENCODED_FORMAT = NEWEST_FORMAT = 4
"""MIXED_FORMAT: commits with copies of several steps. ONE_LOG_FORMAT: a store whose process has one log for several
shards. ENCODED_FORMAT: records, segments and indexes with encoded copies."""

MAX_RECORD = 64 << 10
MAX_SETTINGS = 1 << 20
MAX_LAYOUT = 64 << 20
MAX_LAYOUT_VALUES = 11 << 18
"""Values in a layout: 22 for each of 131,000 parameters with two slots and four dimensions."""
_KEYS, _SIZES = {"dtype", "shape", "data_offsets"}, range(1 << 62)
MAX_HEADER = 64 << 20
MAX_SNAPSHOT = 64 << 20
MAX_TOPOLOGY = 16 << 20
MAX_FLAT = 64
"""Most lists and objects in a file that lists shards: a snapshot, a topology."""
MAX_SHARDS = 1 << 18
"""Most shards in a snapshot or topology."""
MAX_SHARD = 999_999
MAX_SEQ = 10**18

SETTINGS = "scarctl.json"
LOCK = "lock"
REHEARSAL = "rehearsal.json"
TEMPORARY = ".tmp-"
SNAPSHOTS, TOPOLOGIES, HOSTS = "snapshots", "topology", "peers"
RESERVED = "scarctl/"
"""Prefix of tensor names that belong to the store; a model's own names may not begin with it."""

_HEX = re.compile(r"[0-9a-f]+", re.ASCII)
_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", re.ASCII)
_SHARD = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)
_SEGMENT = re.compile(r"[0-9]{8}-[0-9a-f]{32}\.safetensors", re.ASCII)
_RECORD = re.compile(r"([0-9]{20})\.json", re.ASCII)
_INDEX = re.compile(r"([0-9]{20})\.safetensors", re.ASCII)
_SNAPSHOT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.json", re.ASCII)
_TOPOLOGY = re.compile(r"([0-9]{8})\.json", re.ASCII)
_LAYOUT = re.compile(r"([0-9a-f]{64})\.json", re.ASCII)

_HEAL = "the file is damaged or was changed by another program; `scarctl verify` lists the damage"


def corrupt(file: object, reason: str) -> Corruption:
    """Return a `Corruption` that names the file."""
    return Corruption(f"{file}: {reason}", hint=_HEAL)


# --- names --------------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Raise Corruption unless `name` is a relative path of strict components."""
    if not all(_COMPONENT.fullmatch(part) for part in name.split("/")):
        raise Corruption(f"{name!r} is not the name of a file in a store", hint=_HEAL)


def is_hex(text: object, digits: int) -> bool:
    return isinstance(text, str) and len(text) == digits and _HEX.fullmatch(text) is not None


def is_segment_name(name: object) -> bool:
    return isinstance(name, str) and _SEGMENT.fullmatch(name) is not None


def shard_folder(shard: int) -> str:
    return f"shards/{shard}"


def segment_path(shard: int, name: str) -> str:
    return f"shards/{shard}/seg/{name}"


def record_path(shard: int, seq: int) -> str:
    return f"shards/{shard}/log/{seq:020d}.json"


def index_path(shard: int, seq: int) -> str:
    return f"shards/{shard}/index/{seq:020d}.safetensors"


def layout_path(digest: str) -> str:
    return f"layout/{digest}.json"


def snapshot_path(name: str) -> str:
    return f"{SNAPSHOTS}/{name}.json"


def topology_path(epoch: int) -> str:
    return f"{TOPOLOGIES}/{epoch:08d}.json"


def epoch_of_topology(file: str) -> int | None:
    """Return the epoch of a topology from its file name, None for any other file name."""
    match = _TOPOLOGY.fullmatch(file)
    return int(match[1]) if match else None


def lock_path(shard: int) -> str:
    """Return the path of the lock of a shard that one rank writes."""
    return f"shards/{shard}/{LOCK}"


def name_of_snapshot(file: str) -> str | None:
    """Return the name of a snapshot from its file name, None for any other file name."""
    match = _SNAPSHOT.fullmatch(file)
    return match[1] if match else None


def epoch_of_segment(name: str) -> int:
    """Return the epoch of a segment's writer from the segment's name (see `is_segment_name`)."""
    return int(name[:8])


def shard_of_segment(path: str) -> tuple[int, int] | None:
    """Return the shard and epoch of a segment, from its path in the store; None for any other path."""
    parts = path.split("/")
    if len(parts) != 4 or (parts[0], parts[2]) != ("shards", "seg") or not is_segment_name(parts[3]):
        return None
    shard = shard_of_folder(parts[1])
    return None if shard is None else (shard, epoch_of_segment(parts[3]))


def segment_name(epoch: int, unique: str) -> str:
    return f"{epoch:08d}-{unique}.safetensors"


def shard_of_folder(name: str) -> int | None:
    return int(name) if _SHARD.fullmatch(name) else None


def seq_of_record(name: str) -> int | None:
    """Return the sequence number of a record's file name, None for any other name."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match else None


def seq_of_index(name: str) -> int | None:
    match = _INDEX.fullmatch(name)
    return int(match[1]) if match else None


def digest_of_layout(name: str) -> str | None:
    match = _LAYOUT.fullmatch(name)
    return match[1] if match else None


# --- JSON ---------------------------------------------------------------------------------------------------


def canonical(obj: object) -> bytes:
    """Return canonical JSON: sorted keys, no white space, ASCII. Raises ValueError for NaN and infinity."""
    return _ENCODER.encode(obj).encode("ascii")


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def checksum(obj: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of `obj` without its field `checksum`."""
    return hashlib.sha256(canonical({k: v for k, v in obj.items() if k != "checksum"})).hexdigest()


def dump_json(obj: Mapping[str, Any]) -> bytes:
    """Return canonical JSON of `obj` with `checksum` added: the SHA-256 of the canonical JSON without it."""
    return sign_json(obj)[0]


def sign_json(obj: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return `dump_json` and `checksum` of `obj`, which is encoded once."""
    before = canonical({k: v for k, v in obj.items() if k < "checksum"})[1:-1]
    after = canonical({k: v for k, v in obj.items() if k > "checksum"})[1:-1]
    digest = hashlib.sha256(b"{" + b",".join(filter(None, (before, after))) + b"}").hexdigest()
    own = f'"checksum":"{digest}"'.encode("ascii")
    return b"{" + b",".join(filter(None, (before, own, after))) + b"}", digest


def _is_intact(obj: Mapping[str, Any], data: bytes) -> bool:
    """Return whether `data` is `dump_json(obj)`, with each field encoded once: a layout may have 64 MiB."""
    digest, view, at = hashlib.sha256(), memoryview(data), 0
    before = unsigned = b"{"
    for key in sorted(obj):
        name, value = canonical(key) + b":", canonical(obj[key])
        for part in (before, name, value):
            if view[at : at + len(part)] != part:
                return False
            at += len(part)
        if key != "checksum":
            digest.update(unsigned + name)
            digest.update(value)
            unsigned = b","
        before = b","
    digest.update(b"}")
    return data[at:] == b"}" and obj.get("checksum") == digest.hexdigest()


def parse_json(
    data: bytes | str, what: object, *, containers: int = MAX_CONTAINERS, values: int = MAX_VALUES
) -> Any:
    """Parse strict JSON: no duplicate keys, no NaN or infinity, limited nesting, sizes and numbers.

    Raises Corruption.
    """
    if reason := too_much(data, containers=containers, values=values):
        raise corrupt(what, reason)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        obj = dict(pairs)
        if len(obj) != len(pairs):
            raise ValueError("duplicate key")
        return obj

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not allowed")

    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise corrupt(what, "JSON is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError, integers of thousands of digits
        raise corrupt(what, f"not valid JSON ({str(error)[:200]})") from None


def load_json(
    data: bytes, what: object, *, containers: int = MAX_CONTAINERS, values: int = MAX_VALUES
) -> dict[str, Any]:
    """Return the object in a JSON file of the store. Verifies checksum, canonical form and format number.

    containers, values: their largest numbers; see `scarctl.util.json_size`.
    """
    obj = parse_json(data, what, containers=containers, values=values)
    if not isinstance(obj, dict):
        raise corrupt(what, "not a JSON object")
    try:
        intact = _is_intact(obj, data)
    except (ValueError, RecursionError):  # 1e999 parses as infinity, which canonical JSON does not have
        intact = False
    if not intact:
        raise corrupt(what, "its checksum does not match its content")
    check_format(obj.get("format"), what)
    return obj


def check_format(value: object, what: object) -> None:
    """Raise Corruption unless this code can read format number `value`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise corrupt(what, "it has no format number")
    if value > NEWEST_FORMAT:
        raise Corruption(
            f"{what}: format {value} is newer than this scarctl reads ({NEWEST_FORMAT})",
            hint="update scarctl",
            kind="newer-format",
        )


class Fields:
    """Typed access to the fields of a parsed object. A wrong or missing field raises Corruption, naming the file."""

    def __init__(self, obj: object, what: object) -> None:
        if not isinstance(obj, dict):
            raise corrupt(what, "an object is expected")
        self._obj: dict[str, Any] = obj
        self._what = what

    def _get(self, key: str, wanted: type) -> Any:
        value = self._obj.get(key)
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise corrupt(self._what, f"field {key!r} is missing or not of type {wanted.__name__}")
        return value

    def raw(self, key: str) -> Any:
        return self._obj.get(key)

    def text(self, key: str) -> str:
        return str(self._get(key, str))

    def flag(self, key: str) -> bool:
        return bool(self._get(key, bool))

    def integer(self, key: str, low: int = 0, high: int = 1 << 62) -> int:
        value = int(self._get(key, int))
        if not low <= value <= high:
            raise corrupt(self._what, f"field {key!r} is {value}, not in {low}..{high}")
        return value

    def optional(self, key: str, low: int = 0, high: int = 1 << 62) -> int | None:
        return None if self._obj.get(key) is None else self.integer(key, low, high)

    def hex(self, key: str, digits: int, *, empty: bool = False) -> str:
        value = self.text(key)
        if not (is_hex(value, digits) or (empty and value == "")):
            raise corrupt(self._what, f"field {key!r} is not {digits} hexadecimal digits")
        return value


# --- safetensors --------------------------------------------------------------------------------------------


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


def dump_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Header:
    """Place `(name, dtype, shape)` one after another. `encode_header` gives the bytes."""
    return place_header(tensors, metadata)[0]


def place_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[Header, bytes]:
    """Return `dump_header` and its bytes."""
    placed: list[_Placed] = []
    offset = 0
    for name, dtype, shape in tensors:
        size = nbytes(dtype, shape)
        placed.append((name, dtype, tuple(shape), offset, offset + size))
        offset += size
    text = _header_text(metadata, placed)
    length = len(text)
    entries = {
        name: Entry(dtype, shape, start + length, stop + length) for name, dtype, shape, start, stop in placed
    }
    return Header(dict(metadata), entries, length), text


def encode_header(header: Header) -> bytes:
    """Return the length word and JSON, padded with spaces so that the data begin at a multiple of 8."""
    base = header.length
    entries = ((name, e.dtype, e.shape, e.start - base, e.stop - base) for name, e in header.tensors.items())
    return _header_text(header.metadata, entries)


_Placed: TypeAlias = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype and shape of a tensor, and where it begins and ends in the data."""


def _header_text(metadata: Mapping[str, str], tensors: Iterable[_Placed]) -> bytes:
    obj: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, dtype, shape, start, stop in tensors:
        obj[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    text = json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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
