"""Note in a small mapped file next to the arena what its process has saved to the store.

    magic (8 bytes) | own, own k, base, base k (int64 each)

*own* is the id of the writer's term (`scarctl.store.term.number_of`) and its newest acknowledged record that has
changed the state, 0 for none yet. *base* is the line on which the term began, until there is such a record; then 0.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Unavailable
from scarctl.store.store import Found

FILE = "line"
_MAGIC = b"SCARterm"
_HEAD = 8
_LENGTH = _HEAD + 4 * 8


class Word(NamedTuple):
    """What is noted of the arena's lane."""

    own: int
    own_k: int
    base: int = 0
    base_k: int = 0


class LineFile:
    """The file of one arena, for the store's writer."""

    def __init__(self, folder: Path, word: Word) -> None:
        """Replace the file by one with this line. Raises Unavailable if the folder is full."""
        self._numbers: NDArray[np.int64] = np.frombuffer(write_line(folder, word), np.int64, 4, _HEAD)

    def note(self, k: int) -> None:
        """Note that record `k` of the writer's term, which changes the state, is acknowledged."""
        # In this order, whatever a kill leaves says nothing wrong.
        self._numbers[2:] = 0
        self._numbers[1] = k


def write_line(folder: Path, word: Word) -> mmap.mmap:
    """Replace the file by one with this line, and return its map. Raises Unavailable if the folder is full."""
    data = _MAGIC + np.array(word, dtype=np.int64).tobytes()
    temporary = folder / f".{FILE}-new"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError("only a part was written")
            memory = mmap.mmap(fd, len(data))
        finally:
            os.close(fd)
        os.rename(temporary, folder / FILE)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise Unavailable(
            f"{folder / FILE}: {error.strerror or error}", hint="is the folder full?"
        ) from error
    return memory


def noted(folder: Path) -> Word | None:
    """Return the line that the arena in `folder` has noted; None if there is no such file, or it is damaged."""
    try:
        fd = os.open(folder / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        data = os.pread(fd, _LENGTH + 1, 0)
    except OSError:
        return None
    finally:
        os.close(fd)
    if len(data) != _LENGTH or data[:_HEAD] != _MAGIC:
        return None
    return Word(*np.frombuffer(data, np.int64, 4, _HEAD).tolist())


def fit(noted: Word | None, line: Found | None) -> bool:
    """Return whether memory with this note belongs to a store whose lane has this line; None: nothing was noted."""
    if noted is None or line is None:
        return noted is None and line is None
    return _belongs(noted, line)


def _belongs(word: Word, found: Found) -> bool:
    if not found.id:  # nothing was saved to the store
        return not (word.own_k or word.base) and word.own in found.claimed
    return found[:2] == (word.base, word.base_k) or (found.id == word.own and found.k >= word.own_k)
