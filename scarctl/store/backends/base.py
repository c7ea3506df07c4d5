"""Define the interface of backends, which keep a store's files by name.

All guarantees rest on two operations: `writer`, for a large file under a name that nobody else uses, and
`create_exclusive`, for a small file that exactly one caller may create. Both return only when the bytes are durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

from numpy.typing import NDArray

from scarctl.errors import Unavailable
from scarctl.store.backends.parallel import no_bytes
from scarctl.store.format import corrupt

T = TypeVar("T")
R = TypeVar("R")
Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"


class InDoubt(Unavailable):
    """A file became visible but may not be durable: `Blobs.settle` decides. Do not delete files that it names."""

    kind = "in-doubt"


class BlobReader(Protocol):
    size: int

    def read(self, start: int, stop: int) -> bytes:
        """Return all bytes [start, stop). Raises Corruption if the file is shorter."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, contiguous bytes) from offset `start`."""

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill several buffers, each from its offset; concurrently if that is faster."""


class RangeReader:
    """Reads ranges of one file. A wrong offset, from a damaged file, allocates and requests nothing."""

    def __init__(self, where: str, size: int) -> None:
        """where: names the file in errors. size: its bytes."""
        self.size = size
        self._where = where

    def read(self, start: int, stop: int) -> bytes:
        self.check(start, stop)
        data = bytearray(stop - start)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.read_ranges([(start, buffer)])

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for start, buffer in ranges:
            self.read_into(start, buffer)

    def check(self, start: int, stop: int) -> None:
        """Raise Corruption unless the file has these bytes."""
        if not 0 <= start <= stop <= self.size:
            raise corrupt(self._where, f"bytes {start}..{stop} are wanted, it has {self.size}")


class BlobWriter(Protocol):
    def write(self, buffer: Buffer) -> None: ...

    def commit(self) -> None:
        """Make the file durable under its name. If the context ends without it, no file appears."""


class Blobs(Protocol):
    """A place for files. Names are relative, separated by `/`. FileNotFoundError means an absent file, nothing else."""

    gap: int
    """Largest gap in bytes that is read and discarded to avoid a second request."""
    batch: int
    """Bytes of partitions that are read at once: few, so that the next ones reuse the same cached memory."""
    exclusive: bool
    """Whether `create_exclusive` is exclusive against every other writer."""

    def why_not_exclusive(self) -> str | None:
        """Return the reason why this backend cannot create exclusively; None if it can. Sends no request."""

    def where(self, name: str) -> str:
        """Return the full path or address of a file, for messages, without secrets."""

    def has(self, name: str) -> bool:
        """Return whether a file or folder of this name exists."""

    def top(self) -> list[str]:
        """Return the names in the store's own folder, at least some of them; [] if it is absent.

        Raises NoStore if it is not a folder, or its bucket does not exist.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Return a whole small file. Raises Corruption, before reading, if it is longer than `limit`."""

    def reader(self, name: str) -> AbstractContextManager[BlobReader]: ...

    def files(self, folder: str) -> list[tuple[str, int]]:
        """Return (name, bytes) of the regular files in a folder, by name, without temporaries; [] if it is absent."""

    def names(self, folder: str) -> list[str]:
        """Return the names that `files` lists, in any order; cheaper than with sizes."""

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""

    def each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """Yield `work(item)` for every item, in their order; several run concurrently if that is faster.

        size: returns the bytes of a result, to limit the memory of waiting results.

        Raises the error of the first failed item, in their order.
        """

    def writer(self, name: str) -> AbstractContextManager[BlobWriter]:
        """Write a file under a name that no one else writes to: it is not looked whether it exists.

        Raises FileExistsError if it does and this place tells.
        """

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        """Create a complete, durable file, if it is absent. Raises FileExistsError if it exists.

        Raises InDoubt if the file may have been created, or may not be durable. After any other error it was not
        created. A remote store takes a file with the same bytes for its own, so unique files need unique bytes.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Create a small file, or give it other content, all at once but perhaps not durably.

        Only for files that no guarantee depends on. The last of several writers wins.
        """

    def marks(self, folder: str) -> list[tuple[str, str]]:
        """Return (name, mark) of the files that `files` lists. A mark changes with the content; "" if unknown."""

    def settle(self, name: str, data: bytes) -> bool:
        """Decide after InDoubt: True if `name` holds `data` durably, False if it is absent and stays so.

        Raises FileExistsError if it has other data.
        """

    def delete(self, name: str) -> None:
        """Delete a file. Raises FileNotFoundError if it is absent and this place tells, which S3 does not."""

    def uploads(self) -> list[tuple[str, str]]:
        """Return unfinished uploads of the store as (name, token). They take space until committed or aborted.

        Returns [] if the backend has no uploads, or if listing them is not allowed.
        """

    def abort(self, name: str, token: str) -> None:
        """Abort an upload: its writer fails. Does nothing if the upload does not exist."""

    def prepare(self, folder: str, *, known: bool = False) -> None:
        """Create a folder, and ensure that it and its parents in the store are durable.

        known: an existing folder is durable already.
        """

    def begin(self) -> None:
        """Create the store's own folder."""

    def hurry(self) -> None:
        """Wait for no answer until `close`: waiting requests of all threads fail at once, as after their deadline."""

    def close(self) -> None:
        """Release open connections and files. The backend may be used again."""


def as_bytes(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer, without a copy."""
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
