"""What a shard's log says: for every member its newest saved copy, as arrays (docs/FORMAT.md, sections 6 and
7).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scarctl.arrays import adjacent
from scarctl.layout import Layout
from scarctl.store.blob import Blobs
from scarctl.store.format import (
    MAX_HEADER,
    MAX_SEQ,
    Fields,
    canonical,
    check_format,
    corrupt,
    dump_header,
    encode_header,
    header_length,
    parse_header,
    parse_json,
)
from scarctl.store.record import Record
from scarctl.store.segment import SegmentRef, Tail, positions
from scarctl.store.spans import Ids
from scarctl.version import MAX_EPOCH, MAX_STEP, NEVER

KEEP_SEALED = 4096
_WHOLE = 16
"""Bytes of an identity in an index."""

_COLUMNS = {"ids": "I64", "version": "I64", "position": "I64", "segment": "I32", "checksum": "U64"}
_NUMPY = {"I64": "<i8", "I32": "<i4", "U64": "<u8", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class Damage:
    """A record whose segment's list of partitions cannot be read."""

    seq: int
    file: str
    reason: str


class Seal(NamedTuple):
    """A sealed record of a log."""

    seq: int
    epoch: int
    step: int
    whole: str = ""
    """See `Record.whole`."""


@dataclass
class ShardState:
    """State of one shard after record `seq` (-1: empty log). Arrays are over the members, in ascending id
    order.

    `version` -1 and `segment` -1: never saved. `segment` numbers `segments`; `position` is the ordinal of the
    partition among its segment's partitions of its group. `doubt` marks members that may have had a newer
    copy in a damaged segment (`damaged`). `step` is that of the newest commit, -1 if there is none. `sealed`
    lists the sealed records. `whole` names the commit of the whole state whose part all members are, "" when
    they are of none, and `extras_whole` that of the extras: equal versions do not say as much. `extras` is
    `(version, number of the segment)`. `records` counts the log's files. `line`: see `scarctl.store.line`; "" when it
    is not known. `unindexed_records` and `unindexed` are the records, and the partitions in them, since the last index.
    `past`: the state after a record that was asked for, not the newest.
    """

    shard: int
    layout: Layout | None = None
    seq: int = -1
    epoch: int = 0
    step: int = -1
    tail_digest: str = ""
    records: int = 0
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    version: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    segment: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    position: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    checksum: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    doubt: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    segments: list[SegmentRef] = field(default_factory=list)
    sealed: list[Seal] = field(default_factory=list)
    whole: str = ""
    extras_whole: str = ""
    extras: tuple[int, int] | None = None
    damaged: list[Damage] = field(default_factory=list)
    boundary: int = 0
    line: str = ""
    unindexed_records: int = 0
    unindexed: int = 0
    past: bool = False

    @property
    def saved(self) -> NDArray[np.bool_]:
        """Members that have a saved copy."""
        return self.version >= 0

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """Where `ids` stand in the arrays, -1 for those that are not members."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        first, last = int(self.ids[0]), int(self.ids[-1])
        if last - first == len(self.ids) - 1:  # all there are: no need to search
            at = ids - first
            at[(ids < first) | (ids > last)] = -1
            return at
        if np.array_equal(self.ids, ids):
            return np.arange(len(ids), dtype=np.int64)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, at, -1)

    def set_members(self, ids: Ids) -> None:
        """From now on `ids` (ascending) are the members; those that stay keep their copies."""
        at = self.find(ids)
        kept = at >= 0

        def carry(old: NDArray[Any], fill: int) -> NDArray[Any]:
            new = np.full(len(ids), fill, old.dtype)
            new[kept] = old[at[kept]]
            return new

        self.version = carry(self.version, NEVER)
        self.segment = carry(self.segment, -1)
        self.position = carry(self.position, -1)
        self.checksum = carry(self.checksum, 0)
        self.doubt = carry(self.doubt, 0)
        self.ids = ids.copy()

    def apply(
        self, record: Record, layout: Layout, tail: Tail | None, what: object, damage: Damage | None = None
    ) -> None:
        """Advances by one record. `tail` is None if it has no segment, or if that is damaged (`damage`).

        Raises Corruption if the record cannot follow this state.
        """
        line = self.line
        if self.layout is None or self.layout.digest != record.layout:
            self.__dict__.update(ShardState(self.shard, records=self.records).__dict__)
        self.layout = layout
        if damage is not None:
            self.damaged.append(damage)
            self.doubt[:] = True
            self.whole = ""
        elif tail is not None and record.kind == "epoch":
            self.whole = self.whole if np.array_equal(self.ids, tail.ids) else ""
            self.set_members(tail.ids)
        elif tail is not None and record.segment is not None:
            self._save(record, record.segment, tail, what)
        if record.kind != "epoch":
            self.step = record.step
        if record.kind == "commit" and record.partitions:
            self.whole = ""
        if record.sealed:
            self._seal(record)
        self.boundary = record.boundary
        self.line = record.line or line
        self.unindexed_records += 1
        self.unindexed += record.partitions if record.kind != "epoch" else 0
        self.seq, self.epoch, self.tail_digest = record.seq, record.epoch, record.digest

    def _save(self, record: Record, segment: SegmentRef, tail: Tail, what: object) -> None:
        assert self.layout is not None
        assert tail.checksums is not None
        found = self.find(tail.ids)
        if (found < 0).any():
            raise corrupt(
                what,
                f"partition {self.layout.name(int(tail.ids[found < 0][0]))} is not of shard {self.shard}",
            )
        at = adjacent(found)
        number = len(self.segments)
        self.segments.append(segment)
        self.version[at] = record.version if tail.versions is None else tail.versions
        self.segment[at] = number
        self.position[at] = positions(self.layout, tail.ids)
        self.checksum[at] = tail.checksums
        if record.kind == "commit":  # compaction only moves copies
            self.doubt[at] = False
        if record.extras:
            self.extras = (record.version, number)
            self.extras_whole = record.identity if record.sealed else ""

    def _seal(self, record: Record) -> None:
        # A member in doubt may be equal to a copy that is lost: what we have of it is older, and not this
        # version.
        known = self.saved & ~self.doubt
        self.version[known] = record.version
        if known.all():
            self.sealed.append(Seal(record.seq, record.epoch, record.step, record.whole))
            self.whole = record.identity
            del self.sealed[:-KEEP_SEALED]

    def take_over(self, fresh: ShardState, ids: Ids) -> NDArray[np.bool_]:
        """Brings the places of `ids` up to date from a newer state: which of them it has in another segment.

        Newer copies are taken too, but not by a state of the past.
        """
        found = np.zeros(len(ids), bool)
        if not len(fresh.ids):
            return found
        own, there = self.find(ids), fresh.find(ids)
        found |= (there >= 0) & (fresh.segment[there] >= 0)
        same = (fresh.version[there] == self.version[own]) & (fresh.checksum[there] == self.checksum[own])
        if not self.past:
            # In a later epoch also older ones: of a roll-back. But not what stands in for a damaged copy.
            back = (fresh.epoch > self.epoch) & ~fresh.doubt[there]
            same |= (fresh.version[there] > self.version[own]) | back
        found &= same
        before = np.array([s.name for s in self.segments] + [""])
        after = np.array([s.name for s in fresh.segments] + [""])
        found &= before[self.segment[own]] != after[fresh.segment[there]]
        own, there = own[found], there[found]
        self.segment[own] = fresh.segment[there] + np.int32(len(self.segments))
        for name in ("version", "position", "checksum"):
            getattr(self, name)[own] = getattr(fresh, name)[there]
        self.segments = [*self.segments, *fresh.segments]
        return found

    def drop_unused_segments(self) -> None:
        """Forgets the segments that hold nobody's newest copy. Numbers change."""
        used = np.zeros(len(self.segments) + 1, bool)
        used[self.segment] = True  # -1 marks the additional last entry
        if self.extras is not None:
            used[self.extras[1]] = True
        number = np.cumsum(used[:-1], dtype=np.int32) - np.int32(1)
        self.segments = [s for s, keep in zip(self.segments, used[:-1].tolist(), strict=True) if keep]
        self.segment = np.append(number, np.int32(-1))[self.segment]
        if self.extras is not None:
            self.extras = (self.extras[0], int(number[self.extras[1]]))


# --- the index ----------------------------------------------------------------------------------------------


def dump_index(state: ShardState) -> list[bytes | memoryview]:
    """The content of the index file of a state whose unused segments were dropped, in parts."""
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
    metadata = {"format": "1", "kind": "index", "state": canonical(obj).decode()}
    parts: list[bytes | memoryview] = [encode_header(dump_header(shapes, metadata))]
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
    """Whether it says of which commits of the whole state things are; one of an earlier format does not."""


def read_index(blobs: Blobs, path: str, partitions: int) -> NDArray[np.uint8]:
    """The bytes of an index file, uint8. Raises FileNotFoundError; Corruption, before reading, if it has more bytes
    than one of a layout with so many partitions.
    """
    with blobs.reader(path) as file:
        if file.size > 8 + MAX_HEADER + 36 * partitions + (24 + _WHOLE) * KEEP_SEALED + 32:
            raise corrupt(blobs.where(path), f"{file.size} bytes are too many for an index")
        raw = np.empty(file.size, np.uint8)
        file.read_into(0, memoryview(raw))
    return raw


def parse_index(raw: NDArray[np.uint8], what: object, *, shard: int, seq: int) -> Index:
    """An index from its file's bytes (uint8, one dimension; the arrays are views of it). Raises Corruption."""
    if raw.size < 40 or hashlib.sha256(raw[:-32]).digest() != raw[-32:].tobytes():
        raise corrupt(what, "the index's digest does not match its content")
    length = header_length(raw[:8].tobytes(), raw.size, what)
    header = parse_header(raw[:length].tobytes(), raw.size, what)
    number = header.metadata.get("format", "")
    check_format(int(number) if number.isdecimal() and len(number) < 9 else None, what)
    f = Fields(parse_json(header.metadata.get("state", ""), what), what)
    if f.integer("seq", 0, MAX_SEQ) != seq or f.integer("shard") != shard:
        raise corrupt(what, "it is the index of another place")

    def column(name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        e = header.entry(name, dtype, shape, what)
        return raw[e.start : e.stop].view(_NUMPY[dtype]).reshape(e.shape)

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
    """Every number points to something."""
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
