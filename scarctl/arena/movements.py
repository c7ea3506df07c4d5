"""Keep the movements of partitions between their last two copies, in a mapped file next to the arena.

    header (4096 bytes) | version int64 | gap int64 | movements, 2 bytes per value

The store cannot provide movements, because it deletes older copies. The file outlives its process, like the arena, and
is deleted with the arena. Movements are never saved: they only improve an estimate.

A movement is valid only for the copy whose version is next to it. Nothing else in the file has to be trusted.
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
    """A mapped file in the arena's folder. The owner of the arena's lock creates it.

    `version` and `gap` are views of the map, of shape (layout.partitions,): the version of the copy at the end of a
    movement, and its duration in iterations; 0: unknown.
    """

    def __init__(self, folder: Path | None, layout: Layout, groups: Collection[int]) -> None:
        """Open the file if it belongs to this layout and boot; otherwise replace it.

        folder: None keeps the movements in memory without a file, for one process.
        groups: numbers of the groups whose first tensors' movements are kept.

        Raises Unavailable (not enough memory: the message has the bytes needed), AccessDenied.
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
        """Count copies of the versions `old` as `new`, int64 of shape (layout.partitions,); -1: they are invalid.

        If a copy counts as newer, its partition has not moved since: a seal has found it unchanged.
        """
        same = (self.version == old) & (new >= 0)
        self.gap[:] = np.where(same & (self.gap > 0), self.gap + step_of(new) - step_of(old), 0)
        self.version[:] = np.where(same, new, NEVER)


def _file(folder: Path, layout: Layout, size: int) -> mmap.mmap:
    """Return the map of the file in `folder`. A file that cannot be used is replaced."""
    path = folder / MOVEMENTS
    header = _FIXED.pack(_MAGIC, _FORMAT, layout.partitions, size, bytes.fromhex(layout.digest), boot_id())
    try:
        return _map(path, header, size) or _map_new(path, header, size)
    except OSError as error:
        raise folder_error(error, path) from error


def _map(path: Path, header: bytes, size: int) -> mmap.mmap | None:
    """Return the map of an existing file; None if it is missing or cannot be used."""
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
    # Written last, because a file without header is ignored. The zeros are unknown gaps.
    memory[: len(header)] = header
    return memory
