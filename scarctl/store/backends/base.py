"""Define what log and segment code needs from a backend: files of a store by name.

Two operations carry all guarantees: `writer`, for a large file with a unique name, and `create_exclusive`, for a
small file that exactly one caller may create. Both return only when the bytes are durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

from numpy.typing import NDArray

from scarctl.errors import Unavailable
from scarctl.store.backends.parallel import no_bytes

T = TypeVar("T")
R = TypeVar("R")
Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"


class InDoubt(Unavailable):
    """A file became visible but may not be durable: `Blobs.settle` finds out. Delete nothing that it refers
    to.
    """

    kind = "in-doubt"


class BlobReader(Protocol):
    size: int

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes `[start, stop)`, all of them. Raises Corruption if the file ends before."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, contiguous bytes) from offset `start`."""

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill several buffers, each from its offset; at once where that is faster."""


class BlobWriter(Protocol):
    def write(self, buffer: Buffer) -> None: ...

    def commit(self) -> None:
        """Make the file durable under its name. Leaving the context without it: no such file.

        Raises FileExistsError if the name is not unique, unless opening did.
        """


class Blobs(Protocol):
    """A place for files. Names are relative, `/` separated. An absent file is FileNotFoundError and nothing
    else is.
    """

    gap: int
    """Bytes worth reading and throwing away rather than asking for a second range."""

    batch: int
    """Bytes of partitions that are read at a time: not many, so that the next ones get the same memory, and find it in
    the cache."""

    exclusive: bool
    """Whether `create_exclusive` is exclusive against every other writer."""

    def why_not_exclusive(self) -> str | None:
        """Return why `create_exclusive` cannot be exclusive here, by how it is built; None if it can. Asks nobody."""

    def where(self, name: str) -> str:
        """Return the full path or address of a file, for messages. Never anything secret."""

    def has(self, name: str) -> bool:
        """Return whether there is something of this name, whatever it is."""

    def top(self) -> list[str]:
        """Return the names in the store's own folder, at least some of them; [] if it is absent.

        Raises NoStore if it is no folder, or in no bucket.
        """

    def read(self, name: str, limit: int) -> bytes:
        """Return a whole small file. Raises Corruption, before reading, if it is longer than `limit`."""

    def reader(self, name: str) -> AbstractContextManager[BlobReader]: ...

    def files(self, folder: str) -> list[tuple[str, int]]:
        """`(name, bytes)` of the regular files in a folder, by name; temporaries left out; [] if it is
        absent.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names that `files` lists, in no order; cheaper than with sizes."""

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""

    def each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """`work` of every item, in their order; several at once where that is faster.

        size: of the result; not many large ones wait to be taken. Raises what the first in order raised that failed.
        """

    def write_each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """Do work that waits until its writes are durable; else as `each`.

        size: bytes that the work writes.
        """

    def writer(self, name: str) -> AbstractContextManager[BlobWriter]:
        """Write a file whose name is unique. Raises FileExistsError if it is not."""

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        """Create a file whole, durable and only if absent. Raises FileExistsError; InDoubt if visible but
        perhaps not durable, or perhaps created; after any other error the file was not created.

        A remote store cannot distinguish a file of the same bytes from its own, and takes it for that: what must be
        unique says so in its bytes.
        """

    def settle(self, name: str, data: bytes) -> bool:
        """Decide after InDoubt: True if `name` holds `data` durably, False if it is absent and stays so.
        FileExistsError: other data.
        """

    def delete(self, name: str) -> None:
        """Delete a file. FileNotFoundError if absent."""

    def uploads(self) -> list[tuple[str, str]]:
        """Return files of the store that were begun and are not visible yet, as `(name, token)`. They
        take space until they are committed or aborted. [] where there are no such things, or where they may not be
        listed.
        """

    def abort(self, name: str, token: str) -> None:
        """Throw such a file away: a writer that is still at it fails. Does nothing if it is gone."""

    def prepare(self, folder: str, *, known: bool = False) -> None:
        """Make a folder, and ensure that it and all above it in the store are durable.

        known: if it is there, it is durable.
        """

    def begin(self) -> None:
        """Make the store's own folder."""

    def hurry(self) -> None:
        """Wait for no answer any more until `close`: what another thread is waiting for fails at once, as
        after its deadline.
        """

    def close(self) -> None:
        """Free what reading and writing hold open. It may be used again."""


def as_bytes(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer, without a copy."""
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
