"""Read copies of partitions in units of bounded size, each from one segment, and verify every copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption
from scarctl.state.encoding import decode
from scarctl.state.layout import Layout
from scarctl.store.backends.base import Blobs
from scarctl.store.encoder import layout_of
from scarctl.store.format import segment_path
from scarctl.store.ranges import Wanted
from scarctl.store.segment import by_group, groups_checksums, partition_rows
from scarctl.store.segment_reader import open_segment
from scarctl.store.shard_state import ShardState
from scarctl.util.arrays import Bytes, Ids, adjacent

Room: TypeAlias = Callable[[int, Ids], Sequence[Bytes | None] | None]
"""Returns buffers for reading copies of adjacent partitions of a group before they are verified: for every tensor
uint8[bytes], for their rows one after another. None: new memory is used. Called in several threads."""


@dataclass(frozen=True)
class Batch:
    """Verified partitions of one group. `tensors[t]`: uint8[rows, row_bytes], the partitions' rows in order of `ids`.

    `versions`: versions of the copies. `encoded`: whether the tensors are decoded, and so not exact.
    """

    group: int
    ids: Ids
    versions: Ids
    tensors: list[Bytes]
    encoded: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """Members, by their indices in the state, whose copies are in one segment."""

    segment: int
    at: NDArray[np.int64]
    nbytes: int


@dataclass
class Found:
    """The result of reading a unit."""

    batches: list[Batch] = field(default_factory=list)
    corrupt: list[tuple[Ids, str]] = field(default_factory=list)
    gone: list[tuple[Ids, str]] = field(default_factory=list)
    """Copies whose segment is missing."""


def units(state: ShardState, layout: Layout, at: NDArray[np.int64], batch: int) -> Iterator[Unit]:
    """Yield the saved members `at` (ascending) by segment, at most about `batch` bytes each."""
    segments = state.segment[adjacent(at)]
    if (segments[1:] < segments[:-1]).any():
        order = np.argsort(segments, kind="stable")
        at, segments = at[order], segments[order]
    nbytes = layout.bytes_of(state.ids[at])
    for i, j in pairwise([*np.flatnonzero(np.diff(segments, prepend=-1)).tolist(), len(at)]):
        cuts = np.flatnonzero(np.diff((np.cumsum(nbytes[i:j]) - 1) // batch) > 0) + i + 1
        for a, b in pairwise([i, *cuts.tolist(), j]):
            yield Unit(int(segments[a]), at[a:b], int(nbytes[a:b].sum()))


def read_unit(
    blobs: Blobs,
    state: ShardState,
    layout: Layout,
    unit: Unit,
    room: Room | None = None,
    *,
    as_stored: bool = False,
) -> Found:
    """Read a unit's copies, in the order of the layout. Copies that are read into `room` are verified there.

    as_stored: do not decode encoded copies.
    """
    ref = state.segments[unit.segment]
    encoded = ref.encoding != "exact"
    path = segment_path(state.shard, ref.name)
    at = adjacent(unit.at)
    ids, position, checksums, of = (
        state.ids[at],
        state.position[at],
        state.checksum[at],
        state.version[at].copy(),
    )
    found = Found()
    wanted: list[tuple[int, int, int, list[Wanted]]] = []
    try:
        stored = layout_of(layout, ref.encoding, blobs.where(path))
        with open_segment(blobs, path, ref) as segment:
            for g, i, j in by_group(layout, ids):
                group, local = stored.groups[g], ids[i:j] - layout.base[g]
                there = (
                    room(g, ids[i:j])
                    if room is not None and not encoded and ids[j - 1] - ids[i] == j - i - 1
                    else None
                )
                try:
                    pieces = [
                        segment.want(group, t, local, position[i:j], None if there is None else there[t])
                        for t in range(len(group.tensors))
                    ]
                except Corruption as error:
                    found.corrupt.append((ids[i:j], error.message))
                else:
                    wanted.append((g, i, j, pieces))
            segment.fetch([one for *_, pieces in wanted for one in pieces])
    except Corruption as error:
        return Found(corrupt=[(ids, error.message)])
    except FileNotFoundError:
        return Found(gone=[(ids, f"{blobs.where(path)}: the segment is missing")])
    read = [(stored.groups[g], j - i, [one.data for one in pieces]) for g, i, j, pieces in wanted]
    for (g, i, j, _), (_, _, data), sums in zip(wanted, read, groups_checksums(read), strict=True):
        intact = sums == checksums[i:j]
        if not intact.all():
            reason = f"{blobs.where(path)}: data do not match their checksum"
            found.corrupt.append((ids[i:j][~intact], reason))
        if not intact.any():
            continue
        lossy = stored.groups[g] != layout.groups[g]
        if lossy and not as_stored:
            data = decode(layout.groups[g], ref.encoding, data)
        batch = _batch(g, stored if as_stored else layout, ids[i:j], of[i:j], data, intact)
        found.batches.append(replace(batch, encoded=True) if lossy else batch)
    return found


def _batch(
    g: int, layout: Layout, ids: Ids, versions: Ids, data: list[Bytes], intact: NDArray[np.bool_]
) -> Batch:
    group = layout.groups[g]
    # Only the last partition of a group may have fewer rows.
    rows = (len(ids) - 1) * group.rows_per_partition + partition_rows(group, int(ids[-1] - layout.base[g]))
    tensors = [d.reshape(rows, spec.row_bytes) for d, spec in zip(data, group.tensors, strict=True)]
    if not intact.all():
        starts, stops = layout.row_ranges(ids)
        keep = np.repeat(intact, stops - starts)
        ids, versions, tensors = ids[intact], versions[intact], [t[keep] for t in tensors]
    return Batch(g, ids, versions, tensors)
