"""Find a `DataLoader` that the loop reads without the session: which of its batches comes next is not saved."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch.utils.data.dataloader import _BaseDataLoaderIter

_LOOKS = (3, 4)
"""Steps of this process before which the iterators are compared. Reading all objects takes up to 0.1 s."""


def iterators() -> Iterator[_BaseDataLoaderIter]:
    """Yield this process's iterators over DataLoaders."""
    # isinstance would read __class__ of every object, and some objects of torch warn when an attribute is read.
    return (item for item in gc.get_objects() if issubclass(type(item), _BaseDataLoaderIter))


class OtherLoaders:
    """Compares the iterators before two steps: one that has moved on, or was replaced, is read in every iteration.

    A validation's iterator is gone by then, or stays where it is.
    """

    def __init__(self) -> None:
        self._steps, self._head = 0, -1
        self._seen: set[tuple[int, int]] = set()
        """Id and number of batches of each iterator that had begun."""

    def advance(self, mine: set[int], head: int) -> bool:
        """Return whether another iterator has moved on, before the step after `head`. mine: ids of known ones."""
        if head == self._head or self._steps > max(_LOOKS):
            return False
        self._steps, self._head = self._steps + 1, head
        if self._steps not in _LOOKS:
            return False
        before = self._seen
        self._seen = {(id(i), i._num_yielded) for i in iterators() if id(i) not in mine and i._num_yielded}
        return bool(before and self._seen - before)
