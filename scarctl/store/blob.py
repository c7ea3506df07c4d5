"""Files of a store by name: what log and segment code need from a place to keep them.

Two operations carry all guarantees: `writer`, for a large file with a unique name, and `create_exclusive`, for a
small file that exactly one caller may create. Both return only when the bytes are durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

from numpy.typing import NDArray

from scarctl.errors import Unavailable
from scarctl.store.atonce import no_bytes

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
        """The bytes `[start, stop)`, all of them. Raises Corruption if the file ends before."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable, contiguous bytes) from offset `start`."""

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fills several buffers, each from its offset; at once where that is faster."""


class BlobWriter(Protocol):
    def write(self, buffer: Buffer) -> None: ...

    def commit(self) -> None:
        """Makes the file durable under its name. Leaving the context without it: no such file.

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
        """Why `create_exclusive` cannot be exclusive here, by how it is built; None if it can. Asks nobody."""

    def where(self, name: str) -> str:
        """The full path or address of a file, for messages. Never anything secret."""

    def has(self, name: str) -> bool:
        """Whether there is something of this name, whatever it is."""

    def top(self) -> list[str]:
        """Names in the store's own folder, at least some of them; [] if it is absent. Raises NoStore if it is
        no folder, or in no bucket.
        """

    def read(self, name: str, limit: int) -> bytes:
        """A whole small file. Raises Corruption, before reading, if it is longer than `limit`."""

    def reader(self, name: str) -> AbstractContextManager[BlobReader]: ...

    def files(self, folder: str) -> list[tuple[str, int]]:
        """`(name, bytes)` of the regular files in a folder, by name; temporaries left out; [] if it is
        absent.
        """

    def names(self, folder: str) -> list[str]:
        """Names of what `files` lists; cheaper than with sizes, in no order."""

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder."""

    def each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """`work` of every item, in their order; several at once where that is faster.

        size: of the result; not many large ones wait to be taken. Raises what the first in order raised that failed.
        """

    def write_each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """As `each`, for work that waits until what it writes is durable.

        size: bytes that the work writes.
        """

    def writer(self, name: str) -> AbstractContextManager[BlobWriter]:
        """Writes a file whose name is unique. Raises FileExistsError if it is not."""

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        """Creates a file whole, durable and only if absent. Raises FileExistsError; InDoubt if visible but
        perhaps not durable, or perhaps created; after any other error the file was not created.

        A remote store cannot tell a file of the same bytes from its own, and takes it for that: what must be
        unique says so in its bytes.
        """

    def settle(self, name: str, data: bytes) -> bool:
        """After InDoubt: True when `name` holds `data` durably, False when it is absent and stays so.
        FileExistsError: other data.
        """

    def delete(self, name: str) -> None:
        """Deletes a file. FileNotFoundError if absent."""

    def uploads(self) -> list[tuple[str, str]]:
        """Files of the store that somebody has begun to write and that nobody sees, as `(name, token)`. They take
        space until they are committed or aborted. [] where there are no such things, or where they may not be listed.
        """

    def abort(self, name: str, token: str) -> None:
        """Throws such a file away: whoever still writes it fails. Nothing happens if it is gone."""

    def prepare(self, folder: str, *, known: bool = False) -> None:
        """Makes a folder, and sees that it and all above it in the store are durable.

        known: if it is there, it is durable.
        """

    def begin(self) -> None:
        """Makes the store's own folder."""

    def hurry(self) -> None:
        """Until `close` nothing waits for an answer any more: what another thread is waiting for fails at once, as
        after its deadline.
        """

    def close(self) -> None:
        """Frees what reading and writing hold open. It may be used again."""


def as_bytes(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, without a copy."""
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
