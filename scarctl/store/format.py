"""Define names, limits and canonical JSON: all of the format that needs no file.

The parser accepts hostile input: sizes are limited before parsing, and every failure is a `Corruption` that names the
file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from scarctl.errors import Corruption
from scarctl.util.json_size import MAX_CONTAINERS, MAX_VALUES, too_much

FORMAT = 1

MAX_RECORD = 64 << 10
MAX_TERM = 4 << 10
MAX_SETTINGS = 1 << 20
MAX_LAYOUT = 64 << 20
MAX_LAYOUT_VALUES = 11 << 18
"""Values in a layout: 22 for each of 131,000 parameters with two slots and four dimensions."""
MAX_TABLE_TEXT = 64 << 20
MAX_SNAPSHOT = 64 << 20
MAX_TOPOLOGY = 16 << 20
MAX_FLAT = 64
"""Most lists and objects in a file that lists shards: a snapshot, a topology."""
MAX_SHARDS = 1 << 18
"""Most shards in a snapshot or topology."""
MAX_SHARD = 999_999
MAX_RECORDS = (1 << 40) - 1
"""Most records of one term."""

SETTINGS = "scarctl.json"
LOCK = "lock"
REHEARSAL = "rehearsal.json"
TEMPORARY = ".tmp-"
LANES = "lanes"
SNAPSHOTS, TOPOLOGIES, HOSTS = "snapshots", "topology", "peers"
RESERVED = "scarctl/"
"""Prefix of tensor names that belong to the store; a model's own names may not begin with it."""

_HEX = re.compile(r"[0-9a-f]+", re.ASCII)
_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", re.ASCII)
_SHARD = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)
_SEGMENT = re.compile(r"[0-9]{8}-[0-9a-f]{32}\.safetensors", re.ASCII)
_RECORD = re.compile(r"([0-9]{20})\.json", re.ASCII)
_TERM = re.compile(r"([0-9]{8})\.json", re.ASCII)
_LOG = re.compile(r"([0-9]{8})-([0-9a-f]{32})", re.ASCII)
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
    """Return the folder of a lane: of a process that saves alone, of a rank, or of a member."""
    return f"{LANES}/{shard}"


def segment_path(shard: int, name: str) -> str:
    return f"{LANES}/{shard}/seg/{name}"


def terms_folder(shard: int) -> str:
    return f"{LANES}/{shard}/terms"


def term_path(shard: int, number: int) -> str:
    return f"{LANES}/{shard}/terms/{number:08d}.json"


def log_folder(shard: int, number: int, term: str) -> str:
    """Return the folder with the records of a term, by its number and its id."""
    return f"{LANES}/{shard}/log/{number:08d}-{term}"


def record_path(shard: int, number: int, term: str, k: int) -> str:
    return f"{LANES}/{shard}/log/{number:08d}-{term}/{k:020d}.json"


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
    """Return the path of a lane's lock."""
    return f"{LANES}/{shard}/{LOCK}"


def name_of_snapshot(file: str) -> str | None:
    """Return the name of a snapshot from its file name, None for any other file name."""
    match = _SNAPSHOT.fullmatch(file)
    return match[1] if match else None


def term_of_segment(name: str) -> int:
    """Return the number of the term of a segment's writer from its name (see `is_segment_name`)."""
    return int(name[:8])


def shard_of_segment(path: str) -> tuple[int, int] | None:
    """Return the lane of a segment and the number of its term, from its path in the store; None for any other path."""
    parts = path.split("/")
    if len(parts) != 4 or (parts[0], parts[2]) != (LANES, "seg") or not is_segment_name(parts[3]):
        return None
    shard = shard_of_folder(parts[1])
    return None if shard is None else (shard, term_of_segment(parts[3]))


def segment_name(number: int, unique: str) -> str:
    return f"{number:08d}-{unique}.safetensors"


def shard_of_folder(name: str) -> int | None:
    return int(name) if _SHARD.fullmatch(name) else None


def number_of_record(name: str) -> int | None:
    """Return the number of a record within its term from its file name, None for any other name."""
    match = _RECORD.fullmatch(name)
    return int(match[1]) if match and 1 <= int(match[1]) <= MAX_RECORDS else None


def number_of_term(name: str) -> int | None:
    """Return the number of a term from the name of its file, None for any other name."""
    match = _TERM.fullmatch(name)
    return int(match[1]) if match and int(match[1]) else None


def term_of_log(name: str) -> tuple[int, str] | None:
    """Return the number and the id of a term from the name of its log's folder, None for any other name."""
    match = _LOG.fullmatch(name)
    return (int(match[1]), match[2]) if match and int(match[1]) else None


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
    if value > FORMAT:
        raise Corruption(
            f"{what}: format {value} is newer than this scarctl reads ({FORMAT})",
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

    def optional(self, key: str) -> int | None:
        return None if self._obj.get(key) is None else self.integer(key)

    def hex(self, key: str, digits: int, *, empty: bool = False) -> str:
        value = self.text(key)
        if not (is_hex(value, digits) or (empty and value == "")):
            raise corrupt(self._what, f"field {key!r} is not {digits} hexadecimal digits")
        return value
