"""Remember which partitions of a session's live state are known to be lost, until a recovery has restored them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids
from scarctl.util.text import counted


class Marked:
    """The partitions that `Session.mark_lost` has named. Any thread may mark and ask."""

    def __init__(self, layout: Layout) -> None:
        self.mask: NDArray[np.bool_] = np.zeros(layout.partitions, dtype=bool)
        """Whether each partition is marked: bool of shape (layout.partitions,). A change replaces it as a whole."""
        self._layout = layout
        self._lock = threading.Lock()

    @contextmanager
    def none(self) -> Iterator[bool]:
        """Yield whether nothing is marked. Until the end of the block no thread marks anything."""
        with self._lock:
            yield not self.mask.any()

    def add(self, ids: Ids) -> None:
        """Mark these partitions."""
        self._set(ids, marked=True)

    def remove(self, ids: Ids) -> None:
        """Unmark these partitions: they were restored."""
        self._set(ids, marked=False)

    def _set(self, ids: Ids, *, marked: bool) -> None:
        with self._lock:
            mask = self.mask.copy()
            mask[ids] = marked
            self.mask = mask

    @property
    def ids(self) -> Ids:
        """The marked partitions, ascending."""
        return np.flatnonzero(self.mask)

    @property
    def told(self) -> str:
        """What is marked, as the reason why a state is not whole: "2 partitions, such as w[0:4], are marked as lost".

        "" without a mark.
        """
        ids = self.ids
        if not ids.size:
            return ""
        some = f"{counted(ids.size, 'partition')}, {'such as ' if ids.size > 1 else ''}"
        return f"{some}{self._layout.name(int(ids[0]))}, {'are' if ids.size > 1 else 'is'} marked as lost"
