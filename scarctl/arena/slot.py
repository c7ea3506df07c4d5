"""Hold one of an arena's two slots: a copy of the whole state, and the words that say of which moment it is.

A *moment* is a number that counts memory checkpoints, and not steps: a step can have two states. `moments` names the
bytes of each partition's copy by the moment at which they were new. So two copies are equal if, and only if, their
moments are. It is 0 without a copy, and while the copy is written. How old the copies are says the slot's own moment.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.header import FIELDS, Geometry
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER
from scarctl.util.arrays import Bytes, Ids, adjacent

_CHUNK = 1 << 16
"""Partitions that are processed together, so that temporary arrays stay in the cache."""


class Slot:
    """One slot of an arena.

    `moments`: see above. `version`: (epoch, step) at which the bytes were new, see `scarctl.state.version`; -1 without
    a copy. Both are views of the map, int64 of shape (layout.partitions,).
    """

    def __init__(
        self, number: int, memory: mmap.mmap, layout: Layout, geometry: Geometry, words: Ids
    ) -> None:
        self.number = number
        self.layout = layout
        self._memory = memory
        self._geometry = geometry
        n, at = layout.partitions, geometry.slot_arrays_at[number]
        self.moments: Ids = np.frombuffer(memory, np.int64, n, at)
        self.version: Ids = np.frombuffer(memory, np.int64, n, at + 8 * n)
        first = FIELDS.index(f"moment_{number}")
        self._words: Ids = words[first : first + 4]

    @property
    def moment(self) -> int:
        """The moment of the state in this slot; 0 without one."""
        return int(self._words[0])

    @property
    def head(self) -> int:
        """Version (epoch, step) of that state; `NEVER` without one."""
        return int(self._words[1])

    @property
    def whole(self) -> str:
        """Name of that state as a whole: 32 hex digits; "" if its copies are of several states."""
        words = self._words[2:].astype(">i8").tobytes()
        return words.hex() if any(words) else ""

    def name(self, whole: str) -> None:
        """Give the state a name, or "" if its copies are of several."""
        # A process killed between two words leaves a name that no commit has.
        self._words[2:] = np.frombuffer(bytes.fromhex(whole), ">i8") if whole else 0

    def stamp(self, moment: int, head: int, whole: str) -> None:
        """Say of which moment and version the state is."""
        # A reader that sees the moment sees the rest; a process killed in between leaves no new moment.
        self.name(whole)
        self._words[1] = head
        self._words[0] = moment

    def begin(self, ids: Ids) -> None:
        """Begin to write the copies of these partitions: until `end` there are none."""
        self.moments[adjacent(ids)] = 0

    def end(self, ids: Ids, version: int | Ids, moment: int | Ids) -> None:
        """End it. version, moment: one for all, or one for each."""
        at = adjacent(ids)
        self.version[at] = version
        self.moments[at] = moment  # last: the copies are complete from now on

    def reset(self) -> None:
        """Forget all copies."""
        self.moments[:] = 0
        self.version[:] = NEVER
        self.stamp(0, NEVER, "")

    def intact(self) -> NDArray[np.bool_]:
        """Return which partitions have a complete copy: bool of shape (layout.partitions,)."""
        return self.moments > 0

    def newest(self) -> Ids:
        """Return the newest version whose values each copy has: int64 (partitions,), `NEVER` without a copy."""
        return newest_of(self.moments, self.version, self.head if self.whole else NEVER)

    def differs(self, other: Ids) -> NDArray[np.bool_]:
        """See `differing`."""
        return differing(self.moments, other)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def rows(self, g: int, t: int) -> Bytes:
        """Return the rows of tensor `t` of group `g`: a writable view, uint8 of shape (rows, bytes per row)."""
        spec, at = self.layout.groups[g].tensors[t], self.place(g, t)
        return np.frombuffer(self._memory, np.uint8, spec.nbytes, at).reshape(spec.rows, spec.row_bytes)

    def source(self, g: int, t: int, start: int, stop: int) -> memoryview:
        """Return the bytes of rows [start, stop) of a tensor, without a copy, for writing a segment."""
        spec, at = self.layout.groups[g].tensors[t], self.place(g, t)
        return memoryview(self._memory)[at + start * spec.row_bytes : at + stop * spec.row_bytes]

    def memory(self) -> Bytes:
        """Return all tensors in one piece: a writable view, uint8 of shape (bytes,), which begins on a page."""
        at = self._geometry.tensors_at[self.number]
        return np.frombuffer(self._memory, np.uint8, self._geometry.slot_bytes, at)

    def offset(self, g: int, t: int) -> int:
        """Return the offset of tensor `t` of group `g` in `memory`: a multiple of 64 bytes."""
        return self._geometry.tensor_at[g][t]

    def place(self, g: int, t: int) -> int:
        """Return the offset of tensor `t` of group `g` in the arena's file."""
        return self._geometry.tensors_at[self.number] + self._geometry.tensor_at[g][t]

    def place_of(self, rows: Bytes) -> int:
        """Return the offset in the file of a view of `memory`."""
        return self._geometry.tensors_at[self.number] + rows.ctypes.data - self.memory().ctypes.data


def newest_of(moments: Ids, version: Ids, head: int) -> Ids:
    """Return the newest version whose values each copy has, `NEVER` without a copy. All are int64 (partitions,).

    head: version of the state that all copies are of; `NEVER` if they are of several.
    """
    return np.where(moments > 0, version if head == NEVER else np.int64(head), np.int64(NEVER))


def differing(moments: Ids, other: Ids) -> NDArray[np.bool_]:
    """Return which copies are there, and not of the other moments: bool of shape (partitions,)."""
    found = np.empty(moments.size, dtype=bool)
    for first in range(0, found.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        found[part] = (moments[part] != other[part]) & (moments[part] > 0)
    return found
