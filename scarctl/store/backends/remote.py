"""Keep a store's files on any file system of fsspec; `scarctl.store.backends.s3` handles S3.

After an error of a request that creates a file exclusively, the file is read back: the request may have succeeded.
Other files have names that no other writer uses, so they are simply written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any

from scarctl.errors import NoStore, ScarError, Unavailable
from scarctl.store.backends.address import Address
from scarctl.store.backends.base import BlobWriter, Buffer, RangeReader, as_bytes
from scarctl.store.backends.client import Client, Refused
from scarctl.store.backends.remote_errors import Fault, Meaning, Patience, fault_error, in_doubt
from scarctl.store.format import TEMPORARY, corrupt

_TAGS = ("ETag", "etag", "md5Hash")
"""Fields of an entry that identify the content, by file system."""
RANGE = 8 << 20
"""Most bytes of one request: a longer range is read as several."""


class FsspecBlobs(Client):
    """Files under one address. Errors name the address without its secrets. Thread-safe."""

    gap = 64 << 10
    batch = 16 << 20

    def __init__(self, address: Address, *, apart: bool = False) -> None:
        super().__init__(address, apart=apart)
        self.exclusive = True
        """False: the store cannot create exclusively, and was created for a single writer."""

    def where(self, name: str) -> str:
        return f"{self.address.shown}/{name}" if name else self.address.shown

    def _error(self, refused: Refused, name: str, doing: str) -> Exception:
        """Return the error for the caller. Only an absent file gives FileNotFoundError."""
        if refused.fault.meaning is Meaning.ABSENT:
            return FileNotFoundError(errno.ENOENT, "no such file", self.where(name))
        return fault_error(refused.fault, self.where(name), doing)

    # reading

    def has(self, name: str) -> bool:
        try:
            self._size(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, limit: int) -> bytes:
        try:
            data: bytes = self._request("cat_file", self._path(name), start=0, end=limit + 1)
        except Refused as refused:
            if refused.fault.meaning is Meaning.EMPTY:
                return b""
            raise self._error(refused, name, "read") from None
        if len(data) > limit:
            raise corrupt(self.where(name), f"it has more bytes than the limit of {limit}")
        return data

    @contextmanager
    def reader(self, name: str) -> Iterator[RemoteReader]:
        yield RemoteReader(self, name, self._size(name))

    def _size(self, name: str) -> int:
        try:
            found = self._request("info", self._path(name))
        except Refused as refused:
            raise self._error(refused, name, "look at") from None
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no such file", self.where(name))
        return _length(found)

    def _fetch(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every buffer from its offset. Adjacent ranges are read by one request, if it is not too long."""
        requests: list[tuple[int, int, list[memoryview]]] = []
        for start, buffer in sorted(ranges, key=itemgetter(0)):
            for begin in range(0, len(buffer), RANGE):
                piece, first = buffer[begin : begin + RANGE], start + begin
                if requests and requests[-1][1] == first and first + len(piece) - requests[-1][0] <= RANGE:
                    requests[-1][2].append(piece)
                    requests[-1] = (requests[-1][0], first + len(piece), requests[-1][2])
                else:
                    requests.append((first, first + len(piece), [piece]))
        path = self._path(name)
        answers = self.each(lambda r: self._range(name, path, r[0], r[1]), requests, lambda r: r[1] - r[0])
        for (_, _, buffers), data in zip(requests, answers, strict=True):
            at = 0
            for buffer in buffers:
                buffer[:] = data[at : at + len(buffer)]
                at += len(buffer)

    def _range(self, name: str, path: str, start: int, stop: int) -> memoryview:
        try:
            data: bytes = self._request("cat_file", path, start=start, end=stop)
        except Refused as refused:
            if refused.fault.meaning is Meaning.EMPTY:
                raise corrupt(self.where(name), "it ends before its length") from None
            raise self._error(refused, name, "read") from None
        if len(data) != stop - start:
            raise corrupt(self.where(name), f"it ends at byte {start + len(data)}")
        return memoryview(data)

    def files(self, folder: str) -> list[tuple[str, int]]:
        return sorted((name, size) for name, size, _ in self._files(folder))

    def marks(self, folder: str) -> list[tuple[str, str]]:
        return sorted((name, mark) for name, _, mark in self._files(folder))

    def _files(self, folder: str) -> list[tuple[str, int, str]]:
        return [one for one in self._list(folder) if one[1] >= 0 and not one[0].startswith(TEMPORARY)]

    def names(self, folder: str) -> list[str]:
        return [name for name, _ in self.files(folder)]

    def folders(self, folder: str) -> list[str]:
        return sorted(name for name, size, _ in self._list(folder) if size < 0)

    def top(self) -> list[str]:
        try:
            return sorted(name for name, _, _ in self._list("", whole=False))
        except Unavailable as error:
            if error.kind != "no-bucket":
                raise
        raise NoStore(
            f"{self.address.shown}: there is no such bucket",
            hint="check the address; scarctl does not create buckets",
            kind="no-bucket",
        )

    def _list(self, folder: str, *, whole: bool = True) -> list[tuple[str, int, str]]:
        """Return (name, bytes, mark) of the entries in a folder, with -1 bytes for folders. See `marks`.

        whole=False: the first ones are enough.
        """
        try:
            found = self._request("ls", self._folder(folder), detail=True)
        except Refused as refused:
            if refused.fault.meaning is Meaning.ABSENT:
                return []
            raise self._error(refused, folder, "list") from None
        return [
            (
                entry["name"].rstrip("/").rpartition("/")[2],
                -1 if entry["type"] == "directory" else _length(entry),
                next((str(entry[key]) for key in _TAGS if entry.get(key)), ""),
            )
            for entry in found
        ]

    # writing

    def writer(self, name: str) -> AbstractContextManager[BlobWriter]:
        return self._spooled(name)

    @contextmanager
    def _spooled(self, name: str) -> Iterator[BlobWriter]:
        # Not every file system can undo a partial write, so the whole file is gathered before it is sent.
        self._path(name)  # raises for an invalid name, before anything is written
        with tempfile.NamedTemporaryFile(prefix="scarctl-") as file:
            yield _Spool(self, name, file)

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(as_bytes(part) for part in parts)
        if not data:
            raise ValueError("an empty file cannot be created exclusively everywhere")
        self._create(name, data)

    def _create(self, name: str, data: bytes) -> None:
        """Create a file, and determine the outcome even if answers are lost.

        Raises FileExistsError for another writer's file, InDoubt after the deadline, and other errors if it was
        certainly not created.
        """
        path, patience = self._path(name), Patience(self.address.timeout)
        doubt = False
        while True:
            try:
                self._create_once(name, path, data, patience)
                return
            except Refused as refused:
                fault = refused.fault
            if fault.meaning is not Meaning.EXISTS and not fault.passing:
                if doubt:
                    raise in_doubt(self.where(name), fault.detail)
                raise fault_error(fault, self.where(name), "create")
            doubt = True
            # The existing file may be this one: the answer was lost, or the server has repeated the request.
            found = self._look(name, path, len(data), patience)
            if found == data:
                return
            if found is not None:
                raise FileExistsError(errno.EEXIST, "already exists", self.where(name))
            # The file is absent, but a delayed request may still create it, so the same bytes are sent again.
            pause = patience.pause()
            if pause is None or self._hurry.wait(pause):
                raise in_doubt(self.where(name), fault.detail)

    def _create_once(self, name: str, path: str, data: bytes, patience: Patience) -> None:
        if self.exclusive:
            self._once("pipe_file", path, data, mode="create", patience=patience)
            return
        try:
            there = self.has(name)
        except ScarError as error:
            raise Refused(Fault(Meaning.BROKEN, error.kind)) from None
        if there:
            raise Refused(Fault(Meaning.EXISTS, "it exists"))
        self._once("pipe_file", path, data, patience=patience)

    def _look(self, name: str, path: str, length: int, patience: Patience) -> bytes | None:
        """Return at most `length + 1` bytes of the content; None if the file is absent or cannot be read."""
        try:
            data: bytes = self._request("cat_file", path, start=0, end=length + 1, patience=patience)
        except Refused as refused:
            return b"" if refused.fault.meaning is Meaning.EMPTY else None
        return data

    def replace(self, name: str, data: bytes) -> None:
        try:
            self._request("pipe_file", self._path(name), data)
        except Refused as refused:
            raise fault_error(refused.fault, self.where(name), "write") from None

    def settle(self, name: str, data: bytes) -> bool:
        # A delayed request may still create the file, so absence proves nothing. Creating it settles the doubt.
        self._create(name, data)
        return True

    def delete(self, name: str) -> None:
        try:
            self._request("rm_file", self._path(name))
        except Refused as refused:
            raise self._error(refused, name, "delete") from None

    def uploads(self) -> list[tuple[str, str]]:
        return []

    def abort(self, name: str, token: str) -> None:
        """Do nothing, because this backend has no uploads."""

    def prepare(self, folder: str, *, known: bool = False) -> None:
        if known:
            return
        try:
            self._request("makedirs", self._folder(folder), exist_ok=True)
        except Refused as refused:
            if refused.fault.meaning is not Meaning.UNSUPPORTED:
                raise self._error(refused, folder, "make") from None

    def begin(self) -> None:
        self.prepare("")


def _length(entry: Mapping[str, Any]) -> int:
    """Return the bytes of a file from the file system's entry; 0 if unknown."""
    size = entry.get("size")
    return size if isinstance(size, int) and size >= 0 else 0


class RemoteReader(RangeReader):
    def __init__(self, blobs: FsspecBlobs, name: str, size: int) -> None:
        super().__init__(blobs.where(name), size)
        self._blobs = blobs
        self._name = name

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for start, buffer in ranges:
            self.check(start, start + buffer.nbytes)
        wanted = [(start, buffer.cast("B")) for start, buffer in ranges if buffer.nbytes]
        if wanted:
            self._blobs._fetch(self._name, wanted)


class _Spool:
    """A file that is gathered on this machine, and sent when it is complete."""

    def __init__(self, blobs: FsspecBlobs, name: str, file: Any) -> None:
        self._blobs, self._name, self._file = blobs, name, file

    def write(self, buffer: Buffer) -> None:
        try:
            self._file.write(as_bytes(buffer))
        except OSError as error:
            reason = error.strerror or type(error).__name__
        else:
            return
        raise Unavailable(
            f"{tempfile.gettempdir()}: cannot write: {reason}", hint="free some space for temporary files"
        )

    def commit(self) -> None:
        blobs, name = self._blobs, self._name
        try:
            self._file.flush()
            length = os.fstat(self._file.fileno()).st_size
            blobs._request("put_file", self._file.name, blobs._path(name))
            if blobs._size(name) == length:
                return
            error: Exception = Unavailable(f"{blobs.where(name)}: its length differs from the written one")
        except Refused as refused:
            error = fault_error(refused.fault, blobs.where(name), "write")
        except (ScarError, OSError) as failed:
            error = failed
        with contextlib.suppress(ScarError, OSError):
            blobs.delete(name)  # a failure leaves an orphan that no record names
        raise error from None
