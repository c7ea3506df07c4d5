"""Encode, read and check indexes, which replace most of a shard's log for readers (docs/FORMAT.md, section 6)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.state.codec import NUMPY
from scarctl.state.version import MAX_EPOCH, MAX_STEP, NEVER
from scarctl.store.backends.base import Blobs
from scarctl.store.format import (
    ENCODED_FORMAT,
    FORMAT,
    MAX_HEADER,
    MAX_SEQ,
    Fields,
    canonical,
    check_format,
    corrupt,
    header_length,
    parse_header,
    parse_json,
    place_header,
)
from scarctl.store.segment import SegmentRef
from scarctl.store.shard_state import KEEP_SEALED, Seal, ShardState

INDEX_RECORDS = 512
"""Most records between two indexes of a writer."""
INDEX_LEAST = 16
"""Least records between two indexes that are written only to speed up reading: reading so few is fast."""
INDEX_BYTES = 36
"""Bytes of an index per partition."""

_HEADER_BYTES, _PER_MEMBER = 64 << 10, 512
"""Bytes of an index's header without segments, and for each partition: there are no more segments than partitions."""
_OTHERS, _OF_SEGMENT = 64, 8
"""Lists and objects of an index that are not segments; upper bound of a segment's fields."""
_WHOLE = 16
"""Bytes of an identity in an index."""
_COLUMNS = {"ids": "I64", "version": "I64", "position": "I64", "segment": "I32", "checksum": "U64"}


def dump_index(state: ShardState) -> list[bytes | memoryview]:
    """Return the content of a state's index file, in parts. Unused segments must have been dropped from the state."""
    assert state.layout is not None
    obj = {
        "layout": state.layout.digest,
        "shard": state.shard,
        "seq": state.seq,
        "record": state.tail_digest,
        "epoch": state.epoch,
        "step": state.step,
        "extras": list(state.extras) if state.extras else None,
        "extras_whole": state.extras_whole,
        "whole": state.whole,
        "segments": [s.to_json() for s in state.segments],
    }
    sealed = np.array([seal[:3] for seal in state.sealed], np.int64).reshape(-1, 3)
    wholes = np.frombuffer(b"".join(_bytes_of(seal.whole) for seal in state.sealed), np.uint8)
    arrays = [getattr(state, name) for name in ("ids", "version", "position", "checksum")]
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        (name, _COLUMNS[name], (len(state.ids),)) for name in ("ids", "version", "position", "checksum")
    ]
    shapes += [
        ("sealed", "I64", sealed.shape),
        ("wholes", "U8", (len(sealed), _WHOLE)),
        ("segment", "I32", state.segment.shape),
        ("digest", "U8", (32,)),
    ]
    exact = all(s.encoding == "exact" for s in state.segments)
    metadata = {
        "format": str(FORMAT if exact else ENCODED_FORMAT),
        "kind": "index",
        "state": canonical(obj).decode(),
    }
    parts: list[bytes | memoryview] = [place_header(shapes, metadata)[1]]
    parts += [memoryview(np.ascontiguousarray(a)) for a in (*arrays, sealed, wholes, state.segment)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


@dataclass
class Index:
    """A parsed index; `state.layout` is still None, `layout` is its digest."""

    state: ShardState
    layout: str
    names_whole: bool
    """Whether it has the names of commits of the whole state. Earlier formats do not."""


def read_index(blobs: Blobs, path: str, partitions: int) -> NDArray[np.uint8]:
    """Return the bytes of an index file, uint8.

    Raises FileNotFoundError. Raises Corruption before reading if the file is too large for a layout of `partitions`
    partitions.
    """
    with blobs.reader(path) as file:
        if file.size > 8 + MAX_HEADER + INDEX_BYTES * partitions + (24 + _WHOLE) * KEEP_SEALED + 32:
            raise corrupt(blobs.where(path), f"{file.size} bytes are too many for an index")
        raw = np.empty(file.size, np.uint8)
        file.read_into(0, memoryview(raw))
    return raw


def parse_index(raw: NDArray[np.uint8], what: object, *, shard: int, seq: int) -> Index:
    """Return an index from its file's bytes (uint8, one dimension; the arrays are views of it). Raises Corruption."""
    if raw.size < 40 or hashlib.sha256(raw[:-32]).digest() != raw[-32:].tobytes():
        raise corrupt(what, "the index's digest does not match its content")
    length = header_length(raw[:8].tobytes(), raw.size, what)
    if length > _HEADER_BYTES + _PER_MEMBER * ((raw.size - length) // INDEX_BYTES):
        raise corrupt(what, f"a header of {length} bytes is too long for the partitions that follow")
    header = parse_header(raw[:length].tobytes(), raw.size, what)
    number = header.metadata.get("format", "")
    check_format(int(number) if number.isdecimal() and len(number) < 9 else None, what)
    # Each segment has a partition, or the extras.
    most = header.entry("ids", "I64", (-1,), what).shape[0] + _OTHERS
    state_json = parse_json(
        header.metadata.get("state", ""), what, containers=most, values=_OF_SEGMENT * most
    )
    f = Fields(state_json, what)
    if f.integer("seq", 0, MAX_SEQ) != seq or f.integer("shard") != shard:
        raise corrupt(what, "it is the index of another place")

    def column(name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        e = header.entry(name, dtype, shape, what)
        return raw[e.start : e.stop].view(NUMPY[dtype]).reshape(e.shape)

    names_whole = "wholes" in header.tensors
    segments = f.raw("segments")
    if not isinstance(segments, list):
        raise corrupt(what, "it has no list of segments")
    count = len(column("ids", "I64", (-1,)))
    state = ShardState(
        shard,
        seq=seq,
        epoch=f.integer("epoch", 1, MAX_EPOCH),
        step=f.integer("step", -1, MAX_STEP),
        tail_digest=f.hex("record", 64),
        doubt=np.zeros(count, bool),
        segments=[SegmentRef.from_json(s, what) for s in segments],
    )
    sealed = column("sealed", "I64", (-1, 3)).tolist()
    wholes = [""] * len(sealed)
    if names_whole:
        state.whole, state.extras_whole = (f.hex(name, 32, empty=True) for name in ("whole", "extras_whole"))
        wholes = [_text_of(row.tobytes()) for row in column("wholes", "U8", (len(sealed), _WHOLE))]
    state.sealed = [Seal(a, b, c, whole) for (a, b, c), whole in zip(sealed, wholes, strict=True)]
    for name, dtype in _COLUMNS.items():
        setattr(state, name, column(name, dtype, (count,)))
    extras = f.raw("extras")
    if extras is not None:
        if not (isinstance(extras, list) and len(extras) == 2 and all(type(x) is int for x in extras)):
            raise corrupt(what, "its extras are malformed")
        state.extras = (extras[0], extras[1])
    if not _sound(state):
        raise corrupt(what, "its arrays contradict each other")
    return Index(state, f.hex("layout", 64), names_whole)


def _bytes_of(whole: str) -> bytes:
    return bytes.fromhex(whole) if whole else bytes(_WHOLE)


def _text_of(whole: bytes) -> str:
    return whole.hex() if any(whole) else ""


def _sound(state: ShardState) -> bool:
    """Return whether all indices in the arrays are in range."""
    last = len(state.segments)
    if state.extras is not None and not (state.extras[0] >= 0 and 0 <= state.extras[1] < last):
        return False
    if not len(state.ids):
        return True
    return bool(
        state.ids[0] >= 0
        and (state.ids[1:] > state.ids[:-1]).all()
        and state.version.min() >= NEVER
        and state.segment.min() >= -1
        and state.segment.max() < last
        and ((state.version >= 0) == (state.segment >= 0)).all()
        and ((state.segment < 0) | (state.position >= 0)).all()
    )
