"""Read pieces of a segment by ranges, merged with their neighbours, and verify its header and its tail."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from scarctl.state.layout import Group, Layout
from scarctl.state.raw_tensor import RawTensor
from scarctl.store.backends.base import BlobReader, Blobs
from scarctl.store.format import MAX_TABLE_TEXT, RESERVED, check_format, corrupt
from scarctl.store.header import MAX_HEADER, Header, header_length, parse_header
from scarctl.store.ranges import Wanted, together
from scarctl.store.record import FULL, Record
from scarctl.store.segment import EXTRAS, TABLE, SegmentRef, columns, full_piece, partition_rows
from scarctl.store.table import Tail, parse_table
from scarctl.util.arrays import Bytes, Ids


def read_tail(blobs: Blobs, path: str, record: Record, layout: Layout) -> Tail:
    """Return the verified tail of a record's segment. Raises Corruption, or FileNotFoundError if it is missing."""
    ref, what = record.segment, blobs.where(path)
    assert ref is not None, "an end has no segment"
    names = columns(mixed=record.mixed)
    if max(record.partitions, record.rest, record.unsaved, record.doubt) > layout.partitions:
        raise corrupt(what, "its record names more partitions than the layout has")
    own, rest = len(names) * record.partitions, (len(TABLE) - 2) * record.rest + record.unsaved + record.doubt
    text = ref.nbytes - ref.tail - 8 * (own + rest)
    if text < 0 or (text > 0) != (record.kind == FULL) or text > MAX_TABLE_TEXT:
        raise corrupt(
            what,
            f"its tail has {ref.nbytes - ref.tail} bytes, which are not those of its record's partitions",
        )
    with blobs.reader(path) as file:
        if file.size != ref.nbytes:
            raise corrupt(what, f"it has {file.size} bytes, its record says {ref.nbytes}")
        raw = np.empty(ref.nbytes - ref.tail, np.uint8)
        file.read_into(ref.tail, memoryview(raw))
    if hashlib.sha256(raw).hexdigest() != ref.tail_digest:
        raise corrupt(what, "its list of partitions is damaged")
    at = 8 * rest + text
    arrays = dict(zip(names, raw[at:].view("<i8").reshape(len(names), record.partitions), strict=True))
    ids = arrays["partitions"]
    if len(ids) and not (ids[0] >= 0 and ids[-1] < layout.partitions and bool((ids[1:] > ids[:-1]).all())):
        raise corrupt(what, "its list of partitions is not ascending or does not fit the layout")
    table = None
    if record.kind == FULL:
        lengths = [record.rest] * (len(TABLE) - 2) + [record.unsaved]
        parts = np.split(raw[: 8 * rest].view("<i8"), np.cumsum(lengths))
        table = parse_table(parts, raw[8 * rest : at].tobytes(), ids, layout.partitions, what)
    return Tail(ids, arrays["checksums"].view(np.uint64), arrays.get("versions"), table)


# A large segment is opened again for every unit that is read, and parsing would take as long as reading.
_parse_header = functools.lru_cache(maxsize=2)(parse_header)


@contextmanager
def open_segment(blobs: Blobs, path: str, ref: SegmentRef) -> Iterator[SegmentReader]:
    """Open a segment for reading pieces. Raises Corruption, or FileNotFoundError if it is missing."""
    what = blobs.where(path)
    with blobs.reader(path) as file:
        if file.size != ref.nbytes:
            raise corrupt(what, f"it has {file.size} bytes, its record says {ref.nbytes}")
        if ref.head > 8 + MAX_HEADER:
            raise corrupt(what, f"its header has {ref.head} bytes, the limit is {MAX_HEADER}")
        raw = file.read(0, ref.head)
        if header_length(raw[:8], file.size, what) != ref.head:
            raise corrupt(what, "its header's length differs from its record")
        header = _parse_header(raw, file.size, what)
        yield SegmentReader(file, what, ref, raw, header, blobs.gap)


class SegmentReader:
    """Pieces, extras and digests of one open segment. Results are not verified unless a method says so."""

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
        """Verify header, extras and pads against the record. Return the bytes from the end of the data to the tail."""
        between = self._file.read(self._ref.head + self._ref.data, self._ref.tail)
        if hashlib.sha256(self._raw_header + between).hexdigest() != self._ref.digest:
            raise corrupt(self._what, "its header or its extras are damaged")
        check_format(
            int(f) if (f := self.header.metadata.get("format", "")).isdecimal() and len(f) < 9 else None,
            self._what,
        )
        return between

    def lists(self) -> tuple[Ids, NDArray[np.uint64]]:
        """Return the segment's own partitions and their checksums, verified, without its record. `check_head` first."""
        raw = np.empty(self._ref.nbytes - self._ref.tail, np.uint8)
        self._file.read_into(self._ref.tail, memoryview(raw))
        if hashlib.sha256(raw).hexdigest() != self._ref.tail_digest:
            raise corrupt(self._what, "its list of partitions is damaged")
        found = []
        for column, dtype in (("partitions", "I64"), ("checksums", "U64")):
            entry = self.header.entry(RESERVED + column, dtype, (-1,), self._what)
            if entry.start < self._ref.tail:
                raise corrupt(self._what, f"its {column} lie outside its tail")
            found.append(raw[entry.start - self._ref.tail : entry.stop - self._ref.tail].view("<i8"))
        if len(found[0]) != len(found[1]):
            raise corrupt(self._what, "it does not have one checksum for each partition")
        return found[0], found[1].view(np.uint64)

    def extras(self) -> tuple[str, dict[str, RawTensor]]:
        """Return the verified extras: their text and their tensors."""
        between = memoryview(self.check_head())
        base = self._ref.head + self._ref.data
        found = {}
        for name, e in self.header.tensors.items():
            if name.startswith(EXTRAS):
                if not base <= e.start <= e.stop <= self._ref.tail:
                    raise corrupt(self._what, f"tensor {name!r} lies outside the extras")
                found[name.removeprefix(EXTRAS)] = RawTensor(
                    e.dtype, e.shape, bytes(between[e.start - base : e.stop - base])
                )
        return self.header.metadata.get("extras", ""), found

    def want(self, group: Group, t: int, local: Ids, position: Ids, room: Bytes | None = None) -> Wanted:
        """Return a buffer for pieces of tensor `t` of partitions `local` (numbers within the group, ascending).

        position: ordinals of these partitions among the segment's partitions of the group.
        room: as many bytes as the pieces have; the buffer, if the pieces are adjacent in the segment.

        `fetch` fills the buffer. Raises Corruption if the tensor is missing or a position is outside it.
        """
        spec = group.tensors[t]
        entry = self.header.entry(group.key(t), spec.dtype, (-1, *spec.shape[1:]), self._what)
        piece, count = full_piece(group, t), len(local)
        if position[0] < 0 or not bool((position[1:] > position[:-1]).all()):
            raise corrupt(self._what, f"the index places partitions of {group.name!r} out of order")
        last = partition_rows(group, int(local[-1])) * spec.row_bytes
        if int(position[-1]) * piece + last > entry.stop - entry.start:
            raise corrupt(self._what, f"tensor {group.key(t)!r} is too short")
        if room is None or position[-1] - position[0] != count - 1:
            room = np.empty(count * piece, np.uint8)
        return Wanted(entry.start, position, piece, last, room)

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Read all wanted pieces into their buffers."""
        for spans in together(wanted, self._gap):
            self._read(spans)

    def _read(self, spans: list[tuple[Wanted, int, int]]) -> None:
        ranges: list[tuple[int, memoryview]] = []
        scattered: list[tuple[Wanted, int, int, Bytes]] = []
        for want, i, j in spans:
            covered, short = want.covers(i, j), want.short(j)
            into = want.out[i * want.piece : j * want.piece - short]
            if covered != into.size:
                into = np.empty(covered + short, np.uint8)
                scattered.append((want, i, j, into))
            start = want.start + int(want.position[i]) * want.piece
            ranges.append((start, memoryview(into[:covered])))
        self._file.read_ranges(ranges)
        for want, i, j, into in scattered:
            rows = want.position[i:j] - want.position[i]
            want.out[i * want.piece : j * want.piece].reshape(-1, want.piece)[:] = into.reshape(
                -1, want.piece
            )[rows]
