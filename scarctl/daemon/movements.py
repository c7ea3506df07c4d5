"""How far every partition of some parameters had moved between its last two copies: a file beside the arena.

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

from scarctl.daemon.arenafile import MOVEMENTS, boot_id
from scarctl.daemon.folder import folder_error, reserve
from scarctl.layout import DTYPES, Layout
from scarctl.version import NEVER, step_of

_MAGIC = b"SCARmove"
_FORMAT = 1
_HEADER = 4096
_FIXED = struct.Struct("<8sIQQ32s16s")
# magic, format, partitions, size, layout digest, boot

MOVEMENT_BYTES = 2
"""Of one value's movement."""

Ids = NDArray[np.int64]


class Movements:
    """Made by whoever has the arena, and so its lock, in the arena's folder.

    `version` and `gap` are views of the map, of shape (layout.partitions,): the version of the copy that a movement led
    to, and the iterations that it took; 0: it is not known.
    """

    def __init__(self, folder: Path, layout: Layout, groups: Collection[int]) -> None:
        """Open what is there, if it is of this layout and since the machine's start, else make it anew.

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
        path = folder / MOVEMENTS
        header = _FIXED.pack(_MAGIC, _FORMAT, n, at, bytes.fromhex(layout.digest), boot_id())
        try:
            self._memory = _map(path, header, at) or _map_new(path, header, at)
        except OSError as error:
            raise folder_error(error, path) from error
        self.version: Ids = np.frombuffer(self._memory, np.int64, n, _HEADER)
        self.gap: Ids = np.frombuffer(self._memory, np.int64, n, _HEADER + 8 * n)

    def __contains__(self, g: object) -> bool:
        """Whether movements of group `g` are kept."""
        return g in self._at

    def of(self, g: int) -> NDArray[np.int16]:
        """Movements of group `g`: a writable view of its values, bfloat16 by its bits, of shape (values,)."""
        at, count = self._at[g]
        return np.frombuffer(self._memory, np.int16, count, at)

    def relabel(self, old: Ids, new: Ids) -> None:
        """Copies of the versions `old` count as `new` now, int64 of shape (layout.partitions,); -1: they are no good.

        One that counts as newer has stood still since then, for a seal has found it so.
        """
        same = (self.version == old) & (new >= 0)
        self.gap[:] = np.where(same & (self.gap > 0), self.gap + step_of(new) - step_of(old), 0)
        self.version[:] = np.where(same, new, NEVER)


def _map(path: Path, header: bytes, size: int) -> mmap.mmap | None:
    """An existing file, None when there is none, or none of use."""
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
