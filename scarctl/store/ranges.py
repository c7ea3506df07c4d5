"""Choose the byte ranges of a segment to read for the wanted pieces: few bytes, in not too many ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.util.arrays import Bytes, Ids

SPAN = 32 << 20  # largest single range
WASTE = 16  # least wanted bytes per byte that is read and discarded
MANY = 256  # with at least this many ranges of a tensor, more bytes may be discarded


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pieces of one tensor: their positions in the file, and a buffer for them."""

    start: int
    """Offset of the tensor in the file."""
    position: Ids
    piece: int
    last: int
    """Bytes of the last piece."""
    out: Bytes
    """Room for all pieces, one after another: exactly their bytes, or as many as if the last piece were full."""

    @property
    def data(self) -> Bytes:
        """The pieces, one after another."""
        return self.out[: len(self.position) * self.piece - (self.piece - self.last)]

    def short(self, j: int) -> int:
        """Return by how many bytes piece `j - 1` is shorter than a full one."""
        return self.piece - self.last if j == len(self.position) else 0

    def covers(self, i: int, j: int) -> int:
        """Return the bytes from the start of piece `i` to the end of piece `j - 1`, gaps included."""
        return (int(self.position[j - 1] - self.position[i]) + 1) * self.piece - self.short(j)

    def spans(self, gap: int) -> list[tuple[int, int]]:
        """Return the runs (i, j) of pieces that are read as one range each, at most SPAN bytes long."""
        if not self.piece:
            return []
        count = len(self.position)
        if self.position[-1] - self.position[0] == count - 1 and count * self.piece <= SPAN // 2:
            return [(0, count)]  # the usual case
        holes = (np.diff(self.position) - 1) * self.piece
        cut = np.diff(self.position * self.piece // SPAN) != 0
        breaks = (np.flatnonzero((holes > 0) & ~_read_through(holes, self.out.size, gap) | cut) + 1).tolist()
        return list(zip([0, *breaks], [*breaks, len(self.position)], strict=True))


def _read_through(holes: NDArray[np.int64], wanted: int, gap: int) -> NDArray[np.bool_]:
    """Return which holes between pieces are read and discarded: the smallest, while they add few bytes.

    With very many ranges, all holes up to `gap` are read: then the number of ranges costs more than the bytes.
    """
    small = np.flatnonzero((holes > 0) & (holes <= gap))
    small = small[np.argsort(holes[small], kind="stable")]
    cheap = int(np.searchsorted(np.cumsum(holes[small]), wanted // WASTE, side="right"))
    count = max(cheap, int((holes > 0).sum()) - MANY)
    through = np.zeros(len(holes), bool)
    through[small[:count]] = True
    return through


def together(wanted: Iterable[Wanted], gap: int) -> Iterator[list[tuple[Wanted, int, int]]]:
    """Yield lists of spans (wanted, i, j) to request at once, with at most SPAN bytes per list."""
    some: list[tuple[Wanted, int, int]] = []
    covered = 0
    for want in wanted:
        for i, j in want.spans(gap):
            if some and covered + want.covers(i, j) > SPAN:
                yield some
                some, covered = [], 0
            some.append((want, i, j))
            covered += want.covers(i, j)
    if some:
        yield some
