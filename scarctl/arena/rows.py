"""Gather rows of partitions from a slot into one buffer, and put them back, in the order of group, tensor, id."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from scarctl.arena.mapping import COHERENT, open_file, write_at
from scarctl.arena.slot import Slot
from scarctl.state.layout import Layout
from scarctl.util.arrays import Bytes, Ids, adjacent


def read_rows(slot: Slot, ids: Ids, out: Bytes) -> Bytes:
    """Copy the rows of partitions `ids`, ascending, into `out`, uint8, and return the part of it that they take."""
    at = 0
    for rows, which in _pieces(slot, ids):
        size = which.size * rows.shape[1]
        part = out[at : at + size].reshape(which.size, -1)
        if isinstance(near := adjacent(which), slice):
            part[:] = rows[near]
        else:
            np.take(rows, which, axis=0, out=part, mode="clip")
        at += size
    return out[:at]


def copy_rows(source: Slot, target: Slot, ids: Ids) -> None:
    """Copy the rows of partitions `ids`, ascending, from one slot into the other."""
    for (there, which), (here, _) in zip(_pieces(target, ids), _pieces(source, ids), strict=True):
        at = adjacent(which)
        there[at] = here[at]


def write_rows(slot: Slot, ids: Ids, data: Bytes, path: Path | None = None) -> None:
    """Copy the result of `read_rows` into the rows of partitions `ids`. data: uint8, exactly their size.

    path: the arena's file, if the rows may have no space yet. They are written to the file, which neither clears pages
        that are overwritten at once, nor maps them. Raises Unavailable without room.
    """
    at = 0
    file = open_file(path) if path is not None and COHERENT else -1
    try:
        for rows, which in _pieces(slot, ids):
            part = data[at : at + which.size * rows.shape[1]]
            at += part.size
            if file < 0 or path is None:
                rows[adjacent(which)] = part.reshape(which.size, -1)
                continue
            for run in np.split(which, np.flatnonzero(np.diff(which) > 1) + 1):
                size = run.size * rows.shape[1]
                write_at(file, slot.place_of(rows[run[0] :]), memoryview(part[:size]), path)
                part = part[size:]
    finally:
        if file >= 0:
            os.close(file)
    assert at == data.size


class Gathered:
    """A private copy of the rows of some partitions of a slot: a `scarctl.store.segment.Source`."""

    def __init__(self, slot: Slot, ids: Ids) -> None:
        """Copy the rows of `ids`, ascending."""
        self._layout = slot.layout
        data = read_rows(slot, ids, np.empty(int(slot.layout.partition_bytes[ids].sum()), np.uint8))
        self._memory = memoryview(data)
        self._at: Mapping[int, tuple[Ids, Ids, list[int]]] = _places(slot.layout, ids)

    def __call__(self, group: int, tensor: int, start: int, stop: int, /) -> memoryview:
        """Return the rows [start, stop) of a tensor. Those of partitions that it lacks are undefined.

        Both ends lie in partitions that it has. If it lacks some of these, both are ends of partitions.
        """
        own, before, offsets = self._at[group]
        per = self._layout.groups[group].rows_per_partition
        row_bytes = self._layout.groups[group].tensors[tensor].row_bytes
        n, end = np.searchsorted(own, (start // per, -(-stop // per))).tolist()
        first = int(before[n]) + start - int(own[n]) * per
        at = offsets[tensor] + first * row_bytes
        mine = own[n:end] - start // per
        if mine[-1] == mine.size - 1 or not row_bytes:
            return self._memory[at : at + (stop - start) * row_bytes]
        # Of so much memory only what is written to is ever used.
        out = np.empty((stop - start) * row_bytes, np.uint8)
        piece = per * row_bytes
        full = mine[: np.searchsorted(mine, out.size // piece)]
        there = np.frombuffer(self._memory, np.uint8)[at:]
        out[: out.size // piece * piece].reshape(-1, piece)[full] = there[: full.size * piece].reshape(
            -1, piece
        )
        if full.size < mine.size:  # the last partition has fewer rows
            rest = out[out.size // piece * piece :]
            rest[:] = there[full.size * piece :][: rest.size]
        return memoryview(out)


def _places(layout: Layout, ids: Ids) -> dict[int, tuple[Ids, Ids, list[int]]]:
    """Return by group: its partitions among `ids`, the rows before each of them, and where its tensors begin."""
    found: dict[int, tuple[Ids, Ids, list[int]]] = {}
    at = 0
    for g, group in enumerate(layout.groups):
        first, last = np.searchsorted(ids, layout.base[g : g + 2])
        if first == last:
            continue
        starts, stops = layout.row_ranges(ids[first:last])
        ends = np.cumsum(stops - starts)
        offsets = []
        for spec in group.tensors:
            offsets.append(at)
            at += int(ends[-1]) * spec.row_bytes
        found[g] = ids[first:last] - int(layout.base[g]), ends - (stops - starts), offsets
    return found


def _pieces(slot: Slot, ids: Ids) -> Iterator[tuple[Bytes, Ids]]:
    """Yield views with a partition per row, uint8 of shape (partitions, bytes), and which of them are wanted."""
    layout = slot.layout
    for g, group in enumerate(layout.groups):
        base, end = int(layout.base[g]), int(layout.base[g + 1])
        first, last = np.searchsorted(ids, (base, end))
        if first == last:
            continue
        own = ids[first:last] - base
        for t, spec in enumerate(group.tensors):
            if not spec.nbytes:
                continue
            rows = slot.rows(g, t)
            per = group.rows_per_partition
            full = spec.rows // per
            among = own[own < full]
            if among.size:
                yield rows[: full * per].reshape(full, -1), among
            if among.size < own.size:  # the last partition has fewer rows
                yield rows[full * per :].reshape(1, -1), np.zeros(1, np.int64)
