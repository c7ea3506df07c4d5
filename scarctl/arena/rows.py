"""Gather rows of partitions from an arena into one buffer, and put them back, in the order of group, tensor, id."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.header import FILE
from scarctl.arena.mapping import COHERENT, open_file, write_at
from scarctl.util.arrays import Bytes, Ids, adjacent


def read_rows(arena: Arena, ids: Ids, out: Bytes) -> Bytes:
    """Copy the rows of partitions `ids`, ascending, into `out`, uint8, and return the part of it that they take."""
    at = 0
    for rows, which in _pieces(arena, ids):
        size = which.size * rows.shape[1]
        part = out[at : at + size].reshape(which.size, -1)
        if isinstance(near := adjacent(which), slice):
            part[:] = rows[near]
        else:
            np.take(rows, which, axis=0, out=part, mode="clip")
        at += size
    return out[:at]


def write_rows(arena: Arena, ids: Ids, data: Bytes, *, sparse: bool = False) -> None:
    """Copy the result of `read_rows` into the rows of partitions `ids`. data: uint8, exactly their size.

    sparse: the rows may have no space yet. They are written to the file, which neither clears pages that are
        overwritten at once, nor maps them. Raises Unavailable without room.
    """
    at, path = 0, arena.folder / FILE
    file = open_file(path) if sparse and COHERENT else -1
    try:
        for rows, which in _pieces(arena, ids):
            part = data[at : at + which.size * rows.shape[1]]
            at += part.size
            if file < 0:
                rows[adjacent(which)] = part.reshape(which.size, -1)
                continue
            for run in np.split(which, np.flatnonzero(np.diff(which) > 1) + 1):
                size = run.size * rows.shape[1]
                write_at(file, arena.place_of(rows[run[0] :]), memoryview(part[:size]), path)
                part = part[size:]
    finally:
        if file >= 0:
            os.close(file)
    assert at == data.size


def write_fields(
    arena: Arena,
    ids: Ids,
    version: Ids,
    durable: Ids,
    distance: NDArray[np.float64],
    generation: NDArray[np.uint64],
) -> None:
    """Set the fields of partitions `ids` to those of copies in another arena. This ends a copy that `begin` began."""
    arena.version[ids] = version
    arena.durable[ids] = durable
    arena.distance[ids] = distance
    arena.generation[ids] = generation  # last: the copy is intact from now on


def _pieces(arena: Arena, ids: Ids) -> Iterator[tuple[Bytes, Ids]]:
    """Yield views with a partition per row, uint8 of shape (partitions, bytes), and which of them are wanted."""
    layout = arena.layout
    for g, group in enumerate(layout.groups):
        base, end = int(layout.base[g]), int(layout.base[g + 1])
        first, last = np.searchsorted(ids, (base, end))
        if first == last:
            continue
        own = ids[first:last] - base
        for t, spec in enumerate(group.tensors):
            if not spec.nbytes:
                continue
            rows = arena.rows(g, t)
            per = group.rows_per_partition
            full = spec.rows // per
            among = own[own < full]
            if among.size:
                yield rows[: full * per].reshape(full, -1), among
            if among.size < own.size:  # the last partition has fewer rows
                yield rows[full * per :].reshape(1, -1), np.zeros(1, np.int64)
