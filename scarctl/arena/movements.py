"""Keep how far partitions moved between their last two copies: a mapped file next to the arena.

    header (4096 bytes) | version int64 | gap int64 | movements, 2 bytes per value

The store does not have it for long: its older copies are collected. A process that dies leaves the file to the next
one, as it leaves the arena, and it goes when the arena goes. What is in it is never saved: it only serves a guess.

A movement is good for one copy only, of the version that stands with it. Nothing else in the file has to be believed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.folder import folder_error, reserve
from scarctl.arena.header import MOVEMENTS, boot_id
from scarctl.state.layout import DTYPES, Layout
from scarctl.state.version import NEVER, step_of
from scarctl.util.arrays import Ids

_MAGIC = b"SCARmove"
_FORMAT = 1
_HEADER = 4096
_FIXED = struct.Struct("<8sIQQ32s16s")
# magic, format, partitions, size, layout digest, boot

MOVEMENT_BYTES = 2
"""Bytes of one value's movement."""


class Movements:
    """A mapped file in the arena's folder, made by the process that has the arena, and so its lock.

    `version` and `gap` are views of the map, of shape (layout.partitions,): the version of the copy that a movement led
    to, and the iterations that it took; 0: it is not known.
    """

    def __init__(self, folder: Path | None, layout: Layout, groups: Collection[int]) -> None:
        """Open what is there, if it is of this layout and since the machine's start, else make it anew.

        folder: None keeps the movements in memory without a file, for one process.
        groups: numbers of those whose first tensor's movements are kept.
        Raises Unavailable (not enough memory: says how much), AccessDenied.
        """
        n = layout.partitions
        self._at: dict[int, tuple[int, int]] = {}
        at = _HEADER + 16 * n
        for g in groups:
            spec = layout.groups[g].tensors[0]
            self._at[g] = at, spec.nbytes // DTYPES[spec.dtype]
            nbytes = MOVEMENT_BYTES * self._at[g][1]
            at += nbytes + -nbytes % 64
        self._memory = mmap.mmap(-1, at) if folder is None else _file(folder, layout, at)
        self.version: Ids = np.frombuffer(self._memory, np.int64, n, _HEADER)
        self.gap: Ids = np.frombuffer(self._memory, np.int64, n, _HEADER + 8 * n)

    def __contains__(self, g: object) -> bool:
        """Return whether movements of group `g` are kept."""
        return g in self._at

    def of(self, g: int) -> NDArray[np.int16]:
        """Return the movements of group `g`: a writable view, bfloat16 by its bits, of shape (values,)."""
        at, count = self._at[g]
        return np.frombuffer(self._memory, np.int16, count, at)

    def relabel(self, old: Ids, new: Ids) -> None:
        """Copies of the versions `old` count as `new` now, int64 of shape (layout.partitions,); -1: they are no good.

        One that counts as newer has stood still since then, for a seal has found it so.
        """
        same = (self.version == old) & (new >= 0)
        self.gap[:] = np.where(same & (self.gap > 0), self.gap + step_of(new) - step_of(old), 0)
        self.version[:] = np.where(same, new, NEVER)


def _file(folder: Path, layout: Layout, size: int) -> mmap.mmap:
    """The map of the file in `folder`, made anew if the one that is there is of no use."""
    path = folder / MOVEMENTS
    header = _FIXED.pack(_MAGIC, _FORMAT, layout.partitions, size, bytes.fromhex(layout.digest), boot_id())
    try:
        return _map(path, header, size) or _map_new(path, header, size)
    except OSError as error:
        raise folder_error(error, path) from error


def _map(path: Path, header: bytes, size: int) -> mmap.mmap | None:
    """Return an existing file, None when there is none, or none of use."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(fd).st_size == size and os.pread(fd, len(header), 0) == header:
            return mmap.mmap(fd, size)
    finally:
        os.close(fd)
    path.unlink()
    return None


def _map_new(path: Path, header: bytes, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        reserve(fd, size, path.parent)
        memory = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    # Last: a file without it is none. Zeros are gaps that are not known.
    memory[: len(header)] = header
    return memory
