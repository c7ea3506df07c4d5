"""Note the line of each of the store's logs in a small mapped file next to the arena.

    magic (8 bytes) | count int64 | count times: shard int64, noted int64, expected int64

`noted` is the line of the shard's log (`scarctl.store.line`) with the newest record that certainly exists. `expected`
is the line with the record that is being created, or equal to `noted`. Each shard has its own numbers, because records
of several shards may be created at once. After a kill, each shard is at one of its two lines.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Unavailable
from scarctl.store.format import MAX_SHARD

FILE = "lines"
_MAGIC = b"SCARline"
_HEAD = 16
_ROW = 24

Noted = Mapping[int, tuple[int, int]]
"""Two lines by shard; the shard's log has one of them."""


class Lines:
    """The file of one arena, for the store's writer. Several threads may write it, each for another shard."""

    def __init__(self, folder: Path, lines: Mapping[int, int]) -> None:
        """Replace the file by one with these lines, by shard. Raises Unavailable if the folder is full."""
        shards = sorted(lines)
        self._memory = write_lines(folder, {shard: (lines[shard], lines[shard]) for shard in shards})
        self._rows: NDArray[np.int64] = np.frombuffer(self._memory, np.int64, 3 * len(shards), _HEAD).reshape(
            -1, 3
        )
        self._row_of = {shard: row for row, shard in enumerate(shards)}

    def expect(self, shard: int, line: int) -> None:
        """See `scarctl.store.line.Companion`."""
        self._rows[self._row_of[shard], 2] = line

    def note(self, shard: int, line: int) -> None:
        """See `scarctl.store.line.Companion`."""
        row = self._rows[self._row_of[shard]]
        row[2] = line
        row[1] = line


def write_lines(folder: Path, lines: Noted) -> mmap.mmap:
    """Replace the file by one with these lines, and return its map. Raises Unavailable if the folder is full."""
    rows = np.array([(shard, *both) for shard, both in sorted(lines.items())], dtype=np.int64).reshape(-1, 3)
    data = _MAGIC + np.int64(len(rows)).tobytes() + rows.tobytes()
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


def noted(folder: Path) -> Noted:
    """Return the lines that the arena in `folder` has noted; empty if there is no such file, or it is damaged."""
    try:
        fd = os.open(folder / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        most = _HEAD + _ROW * (MAX_SHARD + 1)
        data = os.pread(fd, most + 1, 0) if os.fstat(fd).st_size <= most else b""
    except OSError:
        return {}
    finally:
        os.close(fd)
    if len(data) < _HEAD or data[:8] != _MAGIC or (len(data) - _HEAD) % _ROW:
        return {}
    count = int(np.frombuffer(data, np.int64, 1, 8)[0])
    if count != (len(data) - _HEAD) // _ROW:
        return {}
    rows = np.frombuffer(data, np.int64, 3 * count, _HEAD).reshape(-1, 3).tolist()
    return {shard: (line, expected) for shard, line, expected in rows}


def fit(found: Noted, lines: Mapping[int, int]) -> bool:
    """Return whether each log of a store, by shard, is at one of its two noted lines."""
    return found.keys() == lines.keys() and all(lines[shard] in found[shard] for shard in lines)
