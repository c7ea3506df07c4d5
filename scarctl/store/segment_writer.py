"""Write a segment: stream partitions from the caller's buffers in one pass, and hash each chunk before its write."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.state.encoding import stored_as
from scarctl.state.encodings import Encoding
from scarctl.state.layout import DTYPES, Group, Layout
from scarctl.state.raw_tensor import RawTensor
from scarctl.store import checksum
from scarctl.store.backends.base import BlobWriter, as_bytes
from scarctl.store.encoder import Encoder
from scarctl.store.format import FORMAT, RESERVED
from scarctl.store.header import MAX_HEADER, Header, place_header
from scarctl.store.segment import (
    EXTRAS,
    TABLE,
    Pieces,
    SegmentRef,
    Source,
    by_group,
    columns,
    full_piece,
    partition_rows,
)
from scarctl.store.table import Table
from scarctl.util.arrays import Bytes, Ids

CHUNK = 4 << 20
"""Bytes that are hashed and written, or gathered, at once."""
BIG_RUN = 256 << 10
"""Mean bytes of runs of adjacent partitions above which runs are written from the source without a copy."""


def write_segment(
    out: BlobWriter,
    name: str,
    layout: Layout,
    ids: Ids,
    source: Source | Pieces | Encoder | None,
    metadata: Mapping[str, str],
    *,
    encoding: Encoding = "exact",
    extras: Mapping[str, RawTensor] | None = None,
    versions: NDArray[np.int64] | None = None,
    table: Table | None = None,
) -> tuple[SegmentRef, NDArray[np.uint64]]:
    """Write one segment with the partitions `ids` (ascending, unique). Return its reference and their checksums.

    layout: layout of the live data. source: the whole tensors, or only the pieces, encoded as `encoding` says; None if
    there are none. versions: of the copies, if they are of several steps. table: of a full record.

    The file is complete but not committed. Raises UsageError if a buffer has the wrong length.
    """
    if encoding != "exact":
        layout, metadata = stored_as(layout, encoding), {**metadata, "encoding": encoding}
    data = [] if source is None else _order(layout, ids)
    header, head, tail = _place(layout, ids, data, versions is not None, table, extras or {}, metadata)
    digest = hashlib.sha256()

    def put(buffer: bytes | memoryview) -> None:
        digest.update(buffer)
        out.write(buffer)

    if header.length > 8 + MAX_HEADER:
        raise UsageError(
            f"the header has {header.length} bytes, the limit is {MAX_HEADER}: extras hold too much text"
        )
    put(head)
    checksums = np.zeros(len(ids), np.uint64)
    data_bytes = 0
    if source is not None:
        for g, tensors, i, j in _alike(layout, data):
            group, local = layout.groups[g], ids[i:j] - layout.base[g]
            full = full_piece(group, tensors[0])
            if not isinstance(source, Mapping | Encoder) and len(tensors) > 1:
                gathered = _gather(source, group, g, tensors, local)
                if gathered is not None:
                    factors = np.array([checksum.tensor_constant(t) for t in tensors])
                    hashes = checksum.hash_pieces(gathered, full, len(tensors) * (j - i))
                    checksums[i:j] += factors @ hashes.reshape(len(tensors), j - i)
                    out.write(gathered)
                    data_bytes += gathered.size
                    continue
            for t in tensors:
                factor = checksum.tensor_constant(t)
                chunks = (
                    _cut(source[g, t], group, t, local)
                    if isinstance(source, Mapping)
                    else _encoded(source, g, t, local)
                    if isinstance(source, Encoder)
                    else _chunks(source, group, g, t, local)
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
            extras[n.removeprefix(EXTRAS)].data
            if extras and n.startswith(EXTRAS)
            else bytes(entry.stop - entry.start)
        )
        position = entry.stop
    assert position == tail
    parts: list[NDArray[Any] | bytes] = [] if table is None else [*table.columns(), table.text]
    parts += [ids, checksums] if versions is None else [versions, ids, checksums]
    tail_digest, nbytes = hashlib.sha256(), tail
    for part in parts:
        view = as_bytes(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part)
        tail_digest.update(view)
        out.write(view)
        nbytes += view.nbytes
    ref = SegmentRef(
        name, nbytes, header.length, data_bytes, tail, digest.hexdigest(), tail_digest.hexdigest()
    )
    return replace(ref, encoding=encoding), checksums


def _order(layout: Layout, ids: Ids) -> list[tuple[int, int, int, int]]:
    """Return (group, tensor, i, j) in the order of the file."""
    found = [(g, t, i, j) for g, i, j in by_group(layout, ids) for t in range(len(layout.groups[g].tensors))]
    return sorted(found, key=lambda x: (-DTYPES[layout.groups[x[0]].tensors[x[1]].dtype], x[0], x[1]))


def _alike(
    layout: Layout, data: Sequence[tuple[int, int, int, int]]
) -> Iterator[tuple[int, list[int], int, int]]:
    """Yield (group, tensors, i, j): adjacent tensors of one group whose pieces have the same length."""
    found: list[int] = []
    for number, (g, t, i, j) in enumerate(data):
        found.append(t)
        following = data[number + 1] if number + 1 < len(data) else None
        group = layout.groups[g]
        if (
            following is None
            or following[0] != g
            or group.tensors[following[1]].row_bytes != group.tensors[t].row_bytes
        ):
            yield g, found, i, j
            found = []


def _place(
    layout: Layout,
    ids: Ids,
    data: Sequence[tuple[int, int, int, int]],
    mixed: bool,
    table: Table | None,
    extras: Mapping[str, RawTensor],
    metadata: Mapping[str, str],
) -> tuple[Header, bytes, int]:
    """Return the header, its bytes, and the offset of the tail."""
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
        tensors.append((EXTRAS + name, raw.dtype, tuple(raw.shape)))
        end += memoryview(raw.data).nbytes
    pad("tail")
    if table is not None:
        for column, values in zip(TABLE, table.columns(), strict=True):
            dtype = "U64" if column == "rest-checksums" else "I64"
            tensors.append((RESERVED + column, dtype, (len(values),)))
        tensors.append((f"{RESERVED}table", "U8", (len(table.text),)))
    for column in columns(mixed=mixed):
        tensors.append((RESERVED + column, "U64" if column == "checksums" else "I64", (len(ids),)))
    header, head = place_header(tensors, {"format": str(FORMAT), **metadata})
    return header, head, header.length + end


def _cut(data: Bytes, group: Group, t: int, local: Ids) -> Iterator[tuple[int, int, Bytes]]:
    """Yield (a, b, bytes) as `_chunks` does, from the pieces of `local`."""
    piece = full_piece(group, t)
    last = partition_rows(group, int(local[-1])) * group.tensors[t].row_bytes
    if data.size != (len(local) - 1) * piece + last:
        raise UsageError(f"{group.key(t)}: {data.size} bytes given for {len(local)} pieces of {piece}")
    step = max(1, CHUNK // max(piece, 1))
    for a in range(0, len(local), step):
        b = min(a + step, len(local))
        yield a, b, data[a * piece : b * piece]


def _encoded(source: Encoder, g: int, t: int, local: Ids) -> Iterator[tuple[int, int, Bytes]]:
    """Yield (a, b, bytes) as `_chunks` does, encoded."""
    step = max(1, CHUNK // source.exact_piece(g, t))
    for a in range(0, len(local), step):
        b = min(a + step, len(local))
        yield a, b, source.pieces(g, t, local[a:b])


def _gather(source: Source, group: Group, g: int, tensors: Sequence[int], local: Ids) -> Bytes | None:
    """Return the pieces of partitions `local` of several tensors with pieces of equal length, tensor by tensor.

    Returns None if they are too many for one buffer, one of them is shorter, or they need not be gathered.
    """
    per = min(group.rows_per_partition, group.rows)
    piece, count = full_piece(group, tensors[0]), len(local)
    first, stop = int(local[0]), int(local[-1]) + 1
    if not 0 < piece * count < BIG_RUN or piece * count * len(tensors) > CHUNK or stop * per > group.rows:
        return None
    at = local - first
    found = np.empty((len(tensors), count, piece), np.uint8)
    for k, t in enumerate(tensors):
        rows = _rows(source, group, g, t, first * per, stop * per).reshape(stop - first, piece)
        np.take(rows, at, axis=0, out=found[k], mode="clip")
    return found.reshape(-1)


def _rows(source: Source, group: Group, g: int, t: int, start: int, stop: int) -> Bytes:
    """Return rows of a tensor as bytes. Raises UsageError if the source has others."""
    spec = group.tensors[t]
    view = memoryview(source(g, t, start, stop))
    wanted = (stop - start) * spec.row_bytes
    if view.nbytes != wanted or not view.c_contiguous:
        raise UsageError(
            f"{group.key(t)}[{start}:{stop}]: {view.nbytes} bytes given, "
            f"{wanted} contiguous bytes of {spec.dtype} wanted"
        )
    return np.frombuffer(view.cast("B"), np.uint8) if wanted else np.empty(0, np.uint8)


def _chunks(source: Source, group: Group, g: int, t: int, local: Ids) -> Iterator[tuple[int, int, Bytes]]:
    """Yield (a, b, bytes): the pieces of partitions `local[a:b]`, in order, a few MiB at a time."""
    per = min(group.rows_per_partition, group.rows)
    piece = per * group.tensors[t].row_bytes
    step = max(1, CHUNK // max(piece, 1))
    rows = partial(_rows, source, group, g, t)

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
