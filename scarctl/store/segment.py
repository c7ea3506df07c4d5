"""Describe segments: the immutable safetensors files that hold partitions (docs/FORMAT.md, section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.state.encodings import ENCODINGS, Encoding
from scarctl.state.layout import Group, Layout
from scarctl.store import checksum
from scarctl.store.backends.base import Buffer
from scarctl.store.format import RESERVED, Fields, corrupt, is_segment_name
from scarctl.util.arrays import Bytes, Ids

TABLE = (
    "rest-partitions",
    "rest-versions",
    "rest-positions",
    "rest-checksums",
    "rest-segments",
    "unsaved",
    "doubt",
)
"""Tensors of a full record's table, 8 bytes per partition each. The last two name those that were never saved, and
those that may have had a newer copy in a damaged segment."""

EXTRAS = f"{RESERVED}extras/"
"""Prefix of the names of a segment's extra tensors."""


class Source(Protocol):
    """The source of partitions' rows."""

    def __call__(self, group: int, tensor: int, start: int, stop: int, /) -> Buffer:
        """Return the rows [start, stop) of a tensor: a C-contiguous buffer. It has to be a view, not a copy."""


Pieces: TypeAlias = Mapping[tuple[int, int], Bytes]
"""Concatenated pieces of a segment's partitions, by group and tensor, as uint8[bytes]."""


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """The reference to a segment in its record: enough to find, verify and read any part of it. Offsets in bytes."""

    name: str
    nbytes: int
    head: int
    """Bytes of length word and header, which is the offset of the data."""
    data: int
    """Bytes of partition data."""
    tail: int
    """Offset of the tail, which runs to the end."""
    digest: str
    """SHA-256 of header, extras and pads."""
    tail_digest: str
    encoding: Encoding = "exact"
    """Encoding of the data: see `scarctl.state.encoding`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "head": self.head,
            "data": self.data,
            "tail": self.tail,
            "digest": self.digest,
            "tail_digest": self.tail_digest,
            **({} if self.encoding == "exact" else {"encoding": self.encoding}),
        }

    @staticmethod
    def from_json(obj: object, what: object) -> SegmentRef:
        f = Fields(obj, what)
        name = f.text("name")
        if not is_segment_name(name):
            raise corrupt(what, f"{name!r:.100} is not the name of a segment")
        total = f.integer("bytes", 8)
        tail = f.integer("tail", 8, total)
        head = f.integer("head", 8, tail)
        data = f.integer("data", 0, tail - head)
        encoding = "exact" if f.raw("encoding") is None else f.text("encoding")
        if encoding not in ENCODINGS:
            raise corrupt(what, f"{encoding!r:.40} is not an encoding of copies")
        return SegmentRef(
            name, total, head, data, tail, f.hex("digest", 64), f.hex("tail_digest", 64), encoding
        )


def columns(*, mixed: bool) -> tuple[str, ...]:
    """Return the last tensors of a segment, 8 bytes per partition each."""
    return ("versions", "partitions", "checksums") if mixed else ("partitions", "checksums")


def full_piece(group: Group, t: int) -> int:
    """Return the bytes of a full piece of tensor `t`, by which the hash is chosen."""
    return min(group.rows_per_partition, group.rows) * group.tensors[t].row_bytes


def partition_rows(group: Group, number: int) -> int:
    """Return the rows of the partition numbered `number` within its group: the last one may have fewer."""
    return min(group.rows_per_partition, group.rows - number * group.rows_per_partition)


def ascending(ids: Ids) -> Ids:
    """Return a contiguous copy of `ids` in ascending order, each once."""
    ids = np.array(ids, np.int64).reshape(-1)
    if bool((ids[1:] > ids[:-1]).all()):
        return ids
    ids = np.sort(ids)
    first: NDArray[np.bool_] = np.diff(ids, prepend=ids[0] - 1) != 0
    return ids[first]


def by_group(layout: Layout, ids: Ids) -> Iterator[tuple[int, int, int]]:
    """Yield (group, i, j) for every group of the ascending `ids`: its ids are `ids[i:j]`."""
    if len(ids) > len(layout.base):
        bounds = np.searchsorted(ids, layout.base)
        groups = np.flatnonzero(bounds[1:] > bounds[:-1])
        if not len(groups) or bounds[0] or bounds[-1] < len(ids):
            raise IndexError(f"partition ids are 0..{layout.partitions - 1}")
        yield from zip(groups.tolist(), bounds[groups].tolist(), bounds[groups + 1].tolist(), strict=True)
        return
    groups = layout.group_of(ids)
    groups = groups[np.flatnonzero(np.diff(groups, prepend=-1))]
    starts = np.searchsorted(ids, layout.base[groups]).tolist()
    stops = np.searchsorted(ids, layout.base[groups + 1]).tolist()
    yield from zip(groups.tolist(), starts, stops, strict=True)


def positions(layout: Layout, ids: Ids) -> Ids:
    """Return the ordinal of each of a segment's (ascending) partitions among those of its group."""
    found = np.empty(len(ids), np.int64)
    for _, i, j in by_group(layout, ids):
        found[i:j] = np.arange(j - i)
    return found


def partition_checksums(group: Group, count: int, tensors: Sequence[Bytes]) -> NDArray[np.uint64]:
    """Return the checksums uint64[count] of partitions from their pieces, one byte array per tensor of the group."""
    sums = np.zeros(count, np.uint64)
    for t, data in enumerate(tensors):
        sums += checksum.hash_pieces(data, full_piece(group, t), count) * checksum.tensor_constant(t)
    return sums


def groups_checksums(parts: Sequence[tuple[Group, int, Sequence[Bytes]]]) -> list[NDArray[np.uint64]]:
    """Return the checksums of partitions of several groups, from the arguments of `partition_checksums` for each.

    Small single pieces of one length are hashed together: a model may have ten thousand groups of one partition.
    """
    found: list[NDArray[np.uint64] | None] = [None] * len(parts)
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, (group, count, tensors) in enumerate(parts):
        if count == 1 and full_piece(group, 0) < checksum.WIDE:
            alike.setdefault(tuple(data.size for data in tensors), []).append(number)
        else:
            found[number] = partition_checksums(group, count, tensors)
    for sizes, numbers in alike.items():
        if (
            len(numbers) == 1
            or max(sizes) >= checksum.WIDE
            or any(
                full_piece(parts[number][0], t) >= checksum.WIDE
                for number in numbers
                for t in range(len(sizes))
            )
        ):
            for number in numbers:
                found[number] = partition_checksums(*parts[number])
            continue
        sums = np.zeros(len(numbers), np.uint64)
        for t, size in enumerate(sizes):
            rows = np.concatenate([parts[number][2][t] for number in numbers]).reshape(len(numbers), size)
            sums += checksum.hash_rows(rows) * checksum.tensor_constant(t)
        for at, number in enumerate(numbers):
            found[number] = sums[at : at + 1]
    return [one for one in found if one is not None]
