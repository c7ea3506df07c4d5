"""Keep the rows of a hand-over in a file of their own, so that memory may change while the store takes them.

The file has the rows of the partitions in the order of group, tensor and id, as `scarctl.arena.rows.read_rows` gathers
them. It lies next to the arena, in shared memory, and goes with its hand-over.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.folder import folder_error, no_links
from scarctl.arena.rows import read_rows
from scarctl.errors import Corruption
from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids

_TEMPORARY = ".rows-"


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that were copied out of an arena, and what it said of them at that moment. Arrays are parallel to `ids`."""

    ids: Ids
    """Partitions, ascending."""
    versions: Ids
    generation: NDArray[np.uint64]
    path: Path
    """The file with the rows."""

    def discard(self) -> None:
        """Delete the file: the rows are not handed over."""
        self.path.unlink(missing_ok=True)


def copy_out(arena: Arena, ids: Ids) -> Staged:
    """Copy the rows of partitions `ids` (ascending) into a new file. They must not change meanwhile.

    Raises Unavailable (`kind` "arena-full") if there is no room: nothing is left behind then.
    """
    path = arena.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
    size = int(arena.layout.partition_bytes[ids].sum())
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if size:
                os.posix_fallocate(fd, 0, size)  # a page without space would be a SIGBUS
                with mmap.mmap(fd, size) as memory:
                    out = np.frombuffer(memory, np.uint8)
                    read_rows(arena, ids, out)
                    del out
        finally:
            os.close(fd)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise folder_error(error, arena.folder) from error
        raise
    return Staged(ids, arena.version[ids].copy(), arena.generation[ids].copy(), path)


class Rows:
    """The rows of a hand-over, mapped for reading: a `scarctl.store.segment.Source`."""

    def __init__(self, path: Path, layout: Layout, ids: Ids) -> None:
        """Map the file. Raises FileNotFoundError; Corruption if it has another size than these partitions."""
        size = int(layout.partition_bytes[ids].sum())
        with open(path, "rb", opener=no_links) as file:
            there = os.fstat(file.fileno()).st_size
            if there != size:
                raise Corruption(f"{path} has {there} bytes, and its hand-over {size}")
            self._memory: memoryview = memoryview(
                mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
            )
        self._layout = layout
        self._at: Mapping[int, tuple[Ids, Ids, list[int]]] = _places(layout, ids)

    def __call__(self, group: int, tensor: int, start: int, stop: int, /) -> memoryview:
        """Return the rows [start, stop) of a tensor. Those of partitions that the hand-over lacks are undefined.

        Both ends lie in partitions that it has. If the hand-over lacks some of these, both are ends of partitions.
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
