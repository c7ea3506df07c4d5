"""Segments: the immutable safetensors files that hold partitions (docs/FORMAT.md, section 4).

`write_segment` streams from the caller's buffers in one pass, hashing each chunk right before it is written.
`SegmentReader` reads pieces by ranges and merges neighbours. Both work on whole arrays of partitions.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.extras import RawTensor
from scarctl.layout import DTYPES, Group, Layout
from scarctl.store import checksum
from scarctl.store.blob import BlobReader, Blobs, BlobWriter, Buffer
from scarctl.store.format import (
    MAX_HEADER,
    RESERVED,
    Fields,
    Header,
    check_format,
    corrupt,
    dump_header,
    encode_header,
    header_length,
    is_segment_name,
    parse_header,
)
from scarctl.store.spans import Bytes, Ids, Wanted, together

CHUNK = 4 << 20  # bytes hashed and written, or gathered, at a time
BIG_RUN = (
    256 << 10
)  # runs of adjacent partitions from this mean size on are written from the source without a copy

COLUMNS = {
    "commit": ("partitions", "checksums"),
    "members": ("partitions",),
    "compact": ("versions", "partitions", "checksums"),
}
"""Tensors of the tail by kind of segment, 8 bytes per partition each."""

_EXTRAS = f"{RESERVED}extras/"


class Source(Protocol):
    """Where partitions are copied from."""

    def __call__(self, group: int, tensor: int, start: int, stop: int, /) -> Buffer:
        """Rows [start, stop) of a tensor: a C-contiguous buffer. It must cost nothing: a view, also of the
        whole tensor.
        """


Pieces: TypeAlias = Mapping[tuple[int, int], Bytes]
"""By group and tensor: the pieces of a segment's partitions of that group, one after another, as uint8[bytes]."""


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """What a record says about its segment: enough to find, verify and read any part of it. Offsets in bytes."""

    name: str
    nbytes: int
    head: int
    """Bytes of length word and header; the data begin here."""
    data: int
    """Bytes of partition data."""
    tail: int
    """Offset of the tail, which runs to the end."""
    digest: str
    """SHA-256 of header, extras and pads."""
    tail_digest: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "head": self.head,
            "data": self.data,
            "tail": self.tail,
            "digest": self.digest,
            "tail_digest": self.tail_digest,
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
        return SegmentRef(name, total, head, data, tail, f.hex("digest", 64), f.hex("tail_digest", 64))


@dataclass(frozen=True, slots=True)
class Tail:
    """The per-partition arrays at a segment's end: ids int64[n] ascending, checksums uint64[n], versions
    int64[n].
    """

    ids: Ids
    checksums: NDArray[np.uint64] | None
    versions: NDArray[np.int64] | None


def full_piece(group: Group, t: int) -> int:
    """Bytes of a full piece of tensor `t`: what decides how pieces are hashed."""
    return min(group.rows_per_partition, group.rows) * group.tensors[t].row_bytes


def partition_rows(group: Group, number: int) -> int:
    """Rows of the partition numbered `number` within its group: the last one may have fewer."""
    return min(group.rows_per_partition, group.rows - number * group.rows_per_partition)


def ascending(ids: Ids) -> Ids:
    """A contiguous copy of `ids` in ascending order, each once."""
    ids = np.array(ids, np.int64).reshape(-1)
    if bool((ids[1:] > ids[:-1]).all()):
        return ids
    ids = np.sort(ids)
    first: NDArray[np.bool_] = np.diff(ids, prepend=ids[0] - 1) != 0
    return ids[first]


def by_group(layout: Layout, ids: Ids) -> Iterator[tuple[int, int, int]]:
    """`(group, i, j)` for every group that ascending `ids` touch: its ids are `ids[i:j]`."""
    groups = layout.group_of(ids)
    groups = groups[np.flatnonzero(np.diff(groups, prepend=-1))]
    starts = np.searchsorted(ids, layout.base[groups]).tolist()
    stops = np.searchsorted(ids, layout.base[groups + 1]).tolist()
    yield from zip(groups.tolist(), starts, stops, strict=True)


def positions(layout: Layout, ids: Ids) -> Ids:
    """Ordinal of each of a segment's (ascending) partitions among those of its group."""
    found = np.empty(len(ids), np.int64)
    for _, i, j in by_group(layout, ids):
        found[i:j] = np.arange(j - i)
    return found


# --- writing ------------------------------------------------------------------------------------------------


def write_segment(
    out: BlobWriter,
    name: str,
    layout: Layout,
    ids: Ids,
    source: Source | Pieces | None,
    metadata: Mapping[str, str],
    *,
    kind: str = "commit",
    extras: Mapping[str, RawTensor] | None = None,
    versions: NDArray[np.int64] | None = None,
) -> tuple[SegmentRef, NDArray[np.uint64]]:
    """Writes one segment with the partitions `ids` (ascending, unique) and returns its reference and their
    checksums.

    The file is complete but not committed. `source` is where whole tensors are, or just the pieces; None for
    members. Raises UsageError when a buffer has the wrong length.
    """
    data = [] if source is None else _order(layout, ids)
    header, tail = _place(layout, ids, data, kind, extras or {}, metadata)
    digest = hashlib.sha256()

    def put(buffer: bytes | memoryview) -> None:
        digest.update(buffer)
        out.write(buffer)

    if header.length > 8 + MAX_HEADER:
        raise UsageError(
            f"the header has {header.length} bytes, the limit is {MAX_HEADER}: extras hold too much text"
        )
    put(encode_header(header))
    checksums = np.zeros(len(ids), np.uint64)
    data_bytes = 0
    if source is not None:
        for g, t, i, j in data:
            factor = checksum.tensor_constant(t)
            local = ids[i:j] - layout.base[g]
            full = full_piece(layout.groups[g], t)
            chunks = (
                _cut(source[g, t], layout.groups[g], t, local)
                if isinstance(source, Mapping)
                else _chunks(source, layout.groups[g], g, t, local)
            )
            for a, b, chunk in chunks:
                checksums[i + a : i + b] += checksum.hash_pieces(chunk, full, b - a) * factor
                out.write(chunk)
                data_bytes += chunk.size
    position = header.length + data_bytes
    for n, entry in list(header.tensors.items())[len(data) :]:
        if entry.start >= tail:
            break
        put(
            extras[n.removeprefix(_EXTRAS)].data
            if extras and n.startswith(_EXTRAS)
            else bytes(entry.stop - entry.start)
        )
        position = entry.stop
    assert position == tail
    columns: dict[str, NDArray[Any] | None] = {
        "partitions": ids,
        "checksums": checksums,
        "versions": versions,
    }
    tail_digest = hashlib.sha256()
    for column in COLUMNS[kind]:
        values = columns[column]
        assert values is not None
        tail_digest.update(values)
        out.write(values)
    nbytes = tail + 8 * len(ids) * len(COLUMNS[kind])
    ref = SegmentRef(
        name, nbytes, header.length, data_bytes, tail, digest.hexdigest(), tail_digest.hexdigest()
    )
    return ref, checksums


def _order(layout: Layout, ids: Ids) -> list[tuple[int, int, int, int]]:
    """`(group, tensor, i, j)` in the order of the file."""
    found = [(g, t, i, j) for g, i, j in by_group(layout, ids) for t in range(len(layout.groups[g].tensors))]
    return sorted(found, key=lambda x: (-DTYPES[layout.groups[x[0]].tensors[x[1]].dtype], x[0], x[1]))


def _place(
    layout: Layout,
    ids: Ids,
    data: Sequence[tuple[int, int, int, int]],
    kind: str,
    extras: Mapping[str, RawTensor],
    metadata: Mapping[str, str],
) -> tuple[Header, int]:
    """The header, and the offset of the tail."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    end = 0
    for g, t, i, j in data:
        group = layout.groups[g]
        spec = group.tensors[t]
        last = int(ids[j - 1] - layout.base[g])
        rows = (j - i - 1) * group.rows_per_partition + partition_rows(group, last)
        tensors.append((group.key(t), spec.dtype, (rows, *spec.shape[1:])))
        end += rows * spec.row_bytes

    def pad(what: str) -> None:
        nonlocal end
        if end % 8:
            tensors.append((f"{RESERVED}pad-{what}", "U8", (-end % 8,)))
            end += -end % 8

    if extras:
        pad("extras")
    for name, raw in sorted(extras.items(), key=lambda x: (-DTYPES[x[1].dtype], x[0])):
        tensors.append((_EXTRAS + name, raw.dtype, tuple(raw.shape)))
        end += memoryview(raw.data).nbytes
    pad("tail")
    dtypes = {"partitions": "I64", "checksums": "U64", "versions": "I64"}
    tensors.extend((RESERVED + column, dtypes[column], (len(ids),)) for column in COLUMNS[kind])
    header = dump_header(tensors, {"format": "1", "kind": kind, **metadata})
    return header, header.length + end


def _cut(data: Bytes, group: Group, t: int, local: Ids) -> Iterator[tuple[int, int, Bytes]]:
    """`(a, b, bytes)` as `_chunks`, from the pieces of `local` themselves."""
    piece = full_piece(group, t)
    last = partition_rows(group, int(local[-1])) * group.tensors[t].row_bytes
    if data.size != (len(local) - 1) * piece + last:
        raise UsageError(f"{group.key(t)}: {data.size} bytes given for {len(local)} pieces of {piece}")
    step = max(1, CHUNK // max(piece, 1))
    for a in range(0, len(local), step):
        b = min(a + step, len(local))
        yield a, b, data[a * piece : b * piece]


def _chunks(source: Source, group: Group, g: int, t: int, local: Ids) -> Iterator[tuple[int, int, Bytes]]:
    """`(a, b, bytes)`: the pieces of partitions `local[a:b]`, in order, a few MiB at a time."""
    spec, row = group.tensors[t], group.tensors[t].row_bytes
    per = min(group.rows_per_partition, group.rows)
    piece = per * row
    step = max(1, CHUNK // max(piece, 1))

    def rows(start: int, stop: int) -> Bytes:
        buffer = source(g, t, start, stop)
        view = memoryview(buffer)
        wanted = (stop - start) * row
        if view.nbytes != wanted or not view.c_contiguous:
            raise UsageError(
                f"{group.key(t)}[{start}:{stop}]: {view.nbytes} bytes given, "
                f"{wanted} contiguous bytes of {spec.dtype} wanted"
            )
        return np.frombuffer(view.cast("B"), np.uint8) if wanted else np.empty(0, np.uint8)

    breaks = np.flatnonzero(np.diff(local) != 1) + 1
    if len(local) * piece >= BIG_RUN * (len(breaks) + 1):
        for a, b in zip([0, *breaks.tolist()], [*breaks.tolist(), len(local)], strict=True):
            for i in range(a, b, step):
                j = min(i + step, b)
                start = int(local[i]) * per
                yield i, j, rows(start, min(start + (j - i) * per, group.rows))
        return
    # Many small runs: gathering them into one buffer costs far less than a system call for each.
    # The last partition of a group may be shorter.
    shorter = piece > 0 and (int(local[-1]) + 1) * per > group.rows
    count = len(local) - shorter
    gathered = np.empty((min(step, count), piece), np.uint8)
    for i in range(0, count, step):
        j = min(i + step, count)
        first, last = int(local[i]), int(local[j - 1])
        pieces = rows(first * per, min((last + 1) * per, group.rows)).reshape(last + 1 - first, piece)
        np.take(pieces, local[i:j] - first, axis=0, out=gathered[: j - i], mode="clip")
        yield i, j, gathered[: j - i].reshape(-1)
    if shorter:
        yield count, len(local), rows(int(local[-1]) * per, group.rows)


# --- reading ------------------------------------------------------------------------------------------------


def read_tail(blobs: Blobs, path: str, ref: SegmentRef, kind: str, count: int, layout: Layout) -> Tail:
    """The tail of a segment, verified. Raises Corruption, or FileNotFoundError when the segment is missing."""
    what = blobs.where(path)
    columns = COLUMNS[kind]
    if count > layout.partitions:
        raise corrupt(what, f"{count} partitions are more than the layout has")
    if ref.nbytes - ref.tail != 8 * count * len(columns):
        raise corrupt(
            what, f"its record names {count} partitions, its tail has {ref.nbytes - ref.tail} bytes"
        )
    with blobs.reader(path) as file:
        if file.size != ref.nbytes:
            raise corrupt(what, f"it has {file.size} bytes, its record says {ref.nbytes}")
        raw = np.empty(ref.nbytes - ref.tail, np.uint8)
        file.read_into(ref.tail, memoryview(raw))
    if hashlib.sha256(raw).hexdigest() != ref.tail_digest:
        raise corrupt(what, "its list of partitions is damaged")
    arrays = dict(zip(columns, raw.view("<i8").reshape(len(columns), count), strict=True))
    ids = arrays["partitions"]
    if count and not (ids[0] >= 0 and ids[-1] < layout.partitions and bool((ids[1:] > ids[:-1]).all())):
        raise corrupt(what, "its list of partitions is not ascending or does not fit the layout")
    checksums = arrays.get("checksums")
    return Tail(ids, None if checksums is None else checksums.view(np.uint64), arrays.get("versions"))


# A large segment is opened again for every piece of it that is read; parsing would take as long as reading.
_parse_header = functools.lru_cache(maxsize=2)(parse_header)


@contextmanager
def open_segment(blobs: Blobs, path: str, ref: SegmentRef) -> Iterator[SegmentReader]:
    """A segment opened for reading pieces. Raises Corruption, or FileNotFoundError when it is missing."""
    what = blobs.where(path)
    with blobs.reader(path) as file:
        if file.size != ref.nbytes:
            raise corrupt(what, f"it has {file.size} bytes, its record says {ref.nbytes}")
        if ref.head > 8 + MAX_HEADER:
            raise corrupt(what, f"its header has {ref.head} bytes, the limit is {MAX_HEADER}")
        raw = file.read(0, ref.head)
        if header_length(raw[:8], file.size, what) != ref.head:
            raise corrupt(what, "its header's length is not what its record says")
        header = _parse_header(raw, file.size, what)
        yield SegmentReader(file, what, ref, raw, header, blobs.gap)


class SegmentReader:
    """Pieces, extras and digests of one open segment. What it returns is not verified unless it says so."""

    def __init__(
        self, file: BlobReader, what: str, ref: SegmentRef, raw_header: bytes, header: Header, gap: int
    ) -> None:
        self._file = file
        self._what = what
        self._ref = ref
        self._raw_header = raw_header
        self._gap = gap
        self.header = header

    def check_head(self) -> bytes:
        """Verifies header, extras and pads against the record; returns the bytes from the end of the data to
        the tail.
        """
        between = self._file.read(self._ref.head + self._ref.data, self._ref.tail)
        if hashlib.sha256(self._raw_header + between).hexdigest() != self._ref.digest:
            raise corrupt(self._what, "its header or its extras are damaged")
        check_format(
            int(f) if (f := self.header.metadata.get("format", "")).isdecimal() and len(f) < 9 else None,
            self._what,
        )
        return between

    def extras(self) -> tuple[str, dict[str, RawTensor]]:
        """The extras, verified: their text and their tensors."""
        between = memoryview(self.check_head())
        base = self._ref.head + self._ref.data
        found = {}
        for name, e in self.header.tensors.items():
            if name.startswith(_EXTRAS):
                if not base <= e.start <= e.stop <= self._ref.tail:
                    raise corrupt(self._what, f"tensor {name!r} lies outside the extras")
                found[name.removeprefix(_EXTRAS)] = RawTensor(
                    e.dtype, e.shape, bytes(between[e.start - base : e.stop - base])
                )
        return self.header.metadata.get("extras", ""), found

    def want(self, group: Group, t: int, local: Ids, position: Ids) -> Wanted:
        """Room for pieces of tensor `t` of partitions `local` (numbers within the group, ascending): see `fetch`.

        `position` is where they stand among the segment's partitions of the group. Raises Corruption when the
        tensor is missing or the positions lie outside it.
        """
        spec = group.tensors[t]
        entry = self.header.entry(group.key(t), spec.dtype, (-1, *spec.shape[1:]), self._what)
        piece, count = full_piece(group, t), len(local)
        if position[0] < 0 or not bool((position[1:] > position[:-1]).all()):
            raise corrupt(self._what, f"the index places partitions of {group.name!r} out of order")
        last = partition_rows(group, int(local[-1])) * spec.row_bytes
        if int(position[-1]) * piece + last > entry.stop - entry.start:
            raise corrupt(self._what, f"tensor {group.key(t)!r} is too short")
        return Wanted(entry.start, position, piece, last, np.empty(count * piece, np.uint8))

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Reads all that is wanted."""
        for spans in together(wanted, self._gap):
            self._read(spans)

    def _read(self, spans: list[tuple[Wanted, int, int]]) -> None:
        ranges: list[tuple[int, memoryview]] = []
        scattered: list[tuple[Wanted, int, int, Bytes]] = []
        for want, i, j in spans:
            into = want.out[i * want.piece : j * want.piece]
            if want.covers(i, j) != into.size:
                into = np.empty(want.covers(i, j), np.uint8)
                scattered.append((want, i, j, into))
            short = want.piece - want.last if j == len(want.position) else 0
            start = want.start + int(want.position[i]) * want.piece
            ranges.append((start, memoryview(into[: into.size - short])))
        self._file.read_ranges(ranges)
        for want, i, j, into in scattered:
            rows = want.position[i:j] - want.position[i]
            want.out[i * want.piece : j * want.piece].reshape(-1, want.piece)[:] = into.reshape(
                -1, want.piece
            )[rows]


def partition_checksums(group: Group, count: int, tensors: Sequence[Bytes]) -> NDArray[np.uint64]:
    """Checksums uint64[count] of partitions from their pieces, one byte array per tensor of the group."""
    sums = np.zeros(count, np.uint64)
    for t, data in enumerate(tensors):
        sums += checksum.hash_pieces(data, full_piece(group, t), count) * checksum.tensor_constant(t)
    return sums
