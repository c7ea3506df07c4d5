"""Queue hand-overs from the training process to the persister: files in the arena's folder.

A hand-over names partitions, and contains the extras of their step. It is a safetensors file that appears complete,
under its own number. So the queue outlives both processes, and its files are never partial. Files are not synced: after
a reboot the queue is obsolete, like the arena.

    staged-<number>    its rows were copied into `rows-<number>`, because training changes the arena meanwhile
    handover-<number>  its rows are those in the arena, which nothing changes: the process is dead, or about to end
    moment             no hand-over, but the extras of the newest memory checkpoint; its number is 0
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.folder import clear_queue, folder_error, no_links, private
from scarctl.arena.header import MOMENT
from scarctl.arena.staged import Staged
from scarctl.errors import Corruption
from scarctl.state import codec
from scarctl.state.encodings import ENCODINGS, Encoding
from scarctl.state.version import MAX_EPOCH, pack
from scarctl.store.backends.local_files import os_error
from scarctl.store.format import canonical, is_hex
from scarctl.store.header import header_length, parse_header, place_header
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")

_NAME = re.compile(r"(?:handover|staged)-([0-9]{20})\.safetensors", re.ASCII)
_TEMPORARY = ".handover-"
_ROWS = "rows-"
NEWEST = 0
"""Number of the moment, among those of hand-overs."""
_ABANDONED = 60.0
"""Age in seconds at which a temporary file is taken for that of a killed process."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_IDS = "scarctl/partitions"
_UNSAVED = "scarctl/unsaved"
_VERSIONS = "scarctl/versions"
_GENERATION = "scarctl/generation"
_EXTRAS = "scarctl/extras/"


Identity: TypeAlias = tuple[int, int, int]
"""Inode, time of writing in nanoseconds and size of a hand-over's file: another file under its number differs."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Copies in the arena that are to become durable in the store."""

    number: int
    """Place in the queue."""
    version: int
    ids: Ids
    """Partitions, ascending."""
    whole: str
    """Name of this commit of the whole state, 32 hex digits: partitions not in `ids` equal their newest copies. "" for
    a commit of a part."""
    extras: Any
    """Extras of the step; None if the process died before it queued them."""
    unsaved: NDArray[np.float32] | None = None
    """Distance of each copy of `ids` from the store's, NaN if unknown: float32 (len(ids),); None: not measured.
    Only the order of an evacuation depends on it."""
    encoding: Encoding = "exact"
    """How the store keeps these copies. What is sealed is exact."""
    staged: Staged | None = None
    """Its own rows; None: they are those in the arena."""

    @property
    def sealed(self) -> bool:
        """Whether the hand-over is a commit of the whole state."""
        return bool(self.whole)


def unsaved_distances(handovers: Sequence[HandOver], partitions: int) -> NDArray[np.float32]:
    """Return the distance of each newest copy from the store's, NaN if unknown: float32 of shape (partitions,).

    handovers: all waiting ones, in order.
    """
    found = np.full(partitions, np.nan, dtype=np.float32)
    for handover in handovers:
        if handover.unsaved is not None:
            found[handover.ids] = handover.unsaved
    return found


class HandOverQueue:
    """Hand-overs in an arena's folder, in the order in which they were put.

    Usually one process puts hand-overs. After its death, its daemon and a rescuing rank may both do so.
    """

    def __init__(self, folder: Path, taken: Callable[[], int] = lambda: 0) -> None:
        """Use the queue in `folder`. taken: returns the newest number that was read (`Arena.taken`), for `put`."""
        self._folder = folder
        self._taken = taken
        self._lock = threading.Lock()
        self._next = 1
        self._damaged: set[int] = set()
        """Hand-overs that were logged as damaged."""

    def put(
        self,
        *,
        version: int,
        ids: Ids,
        whole: str = "",
        extras: Any,
        unsaved: NDArray[np.float32] | None = None,
        encoding: Encoding = "exact",
        staged: Staged | None = None,
    ) -> int:
        """Queue a hand-over and return its number. Raises Unavailable if the folder is full.

        staged: the rows of `ids`; their file becomes part of the queue, or is deleted.
        """
        try:
            temporary = self._write(version, ids, whole, extras, unsaved, encoding, staged)
        except BaseException:
            if staged is not None:
                staged.discard()
            raise
        with self._lock:
            rows: Path | None = None if staged is None else staged.path
            try:
                while True:
                    # The folder is listed every time, because other processes may have queued hand-overs, too.
                    there = max(_numbers(self._folder), default=0)
                    number = max(self._next, self._taken() + 1, there + 1)
                    if rows is not None:  # before the hand-over, which is never without its rows
                        os.rename(rows, self._rows(number))
                        rows = self._rows(number)
                    if _publish(temporary, self._path(number, staged=staged is not None)):
                        break
            except OSError as error:
                if rows is not None:
                    rows.unlink(missing_ok=True)
                raise folder_error(error, temporary) from error
            finally:
                temporary.unlink(missing_ok=True)
            self._next = number + 1
        return number

    def note(self, *, version: int, whole: str, extras: Any) -> None:
        """Keep the extras of the newest memory checkpoint, in place of those before. Raises as `put` does.

        whole: name of the state that all copies in the arena then have; "" if they are of several.
        """
        temporary = self._write(version, np.empty(0, np.int64), whole, extras, None)
        try:
            os.replace(temporary, self._path(NEWEST))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise folder_error(error, temporary) from error

    def moment(self) -> HandOver | None:
        """Return the newest memory checkpoint, without partitions; None without one. A damaged one is logged once."""
        return self._one(NEWEST)

    def unseal(self) -> None:
        """Replace waiting seals by hand-overs that seal nothing. No thread may save meanwhile. Raises as `put` does.

        A seal with rows of its own stays as it is, because they do not change.
        """
        for one in (*self.pending(), self.moment()):
            if one is None or not one.sealed or one.staged is not None:
                continue
            temporary = self._write(one.version, one.ids, "", one.extras, one.unsaved)
            try:
                os.replace(temporary, self._path(one.number))
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise folder_error(error, temporary) from error

    def _write(
        self,
        version: int,
        ids: Ids,
        whole: str,
        extras: Any,
        unsaved: NDArray[np.float32] | None,
        encoding: Encoding = "exact",
        staged: Staged | None = None,
    ) -> Path:
        """Write a hand-over to a temporary file, and return its path."""
        text, tensors = codec.encode(extras) if extras is not None else ("", {})
        parts = [np.ascontiguousarray(ids, dtype="<i8").tobytes()]
        entries: list[tuple[str, str, tuple[int, ...]]] = [(_IDS, "I64", (len(ids),))]
        if unsaved is not None:
            parts.append(np.ascontiguousarray(unsaved, dtype="<f4").tobytes())
            entries.append((_UNSAVED, "F32", (len(ids),)))
        if staged is not None:
            parts += [
                np.ascontiguousarray(staged.versions, dtype="<i8").tobytes(),
                np.ascontiguousarray(staged.generation, dtype="<u8").tobytes(),
            ]
            entries += [(_VERSIONS, "I64", (len(ids),)), (_GENERATION, "U64", (len(ids),))]
        parts += [bytes(t.data) for t in tensors.values()]
        metadata = {"version": str(version), "whole": whole, "extras": text, "encoding": encoding}
        metadata["digest"] = _digest(metadata, b"".join(parts))
        shapes = [*entries, *((_EXTRAS + n, t.dtype, t.shape) for n, t in tensors.items())]
        head = place_header(shapes, metadata)[1]
        temporary = self._folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb", opener=private) as file:
                file.writelines([head, *parts])
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise folder_error(error, temporary) from error
            raise
        return temporary

    def sweep(self) -> None:
        """Delete the temporary files of killed processes, and rows without a hand-over.

        Call it before this process sets rows aside. Others that queue hand-overs meanwhile have none of their own.
        """
        waiting = {self._rows(number).name for number in self.numbers()}
        for path in self._folder.glob(f"*{_ROWS}*"):
            if path.name not in waiting:
                path.unlink(missing_ok=True)
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    def has(self, number: int) -> bool:
        """Return whether a hand-over waits; False too if that is unknown. Faster than `numbers`."""
        return os.path.exists(self._path(number)) or os.path.exists(self._path(number, staged=True))

    def identity(self, number: int) -> Identity | None:
        """Return the identity of one hand-over's file; None if it is gone. Raises Unavailable, AccessDenied."""
        path = self._path(number)
        try:
            found = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise os_error(error, path, "read") from error
        return found.st_ino, found.st_mtime_ns, found.st_size

    def numbers(self) -> list[int]:
        """Return the numbers of all hand-overs, in order."""
        return sorted(_numbers(self._folder))

    def small(self) -> list[int]:
        """Return the numbers of the moment and of hand-overs without rows of their own, which may leave this host."""
        numbers = (NEWEST, *self.numbers()) if self._folder.is_dir() else ()
        return [number for number in numbers if os.path.lexists(self._path(number))]

    def file(self, number: int) -> bytes | None:
        """Return the bytes of one hand-over's file; None if it is gone. Raises Unavailable, AccessDenied."""
        path = self._path(number)
        try:
            with open(path, "rb", opener=no_links) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise os_error(error, path, "read") from error

    def read(self, number: int) -> HandOver:
        """Return one hand-over. Raises FileNotFoundError; Corruption if it is not what `put` wrote."""
        path = self._path(number)
        if number != NEWEST and not os.path.lexists(path):
            path = self._path(number, staged=True)
        try:
            with open(path, "rb", opener=no_links) as file:
                size = os.fstat(file.fileno()).st_size
                prefix = file.read(8)
                prefix += file.read(header_length(prefix, size, path) - 8)
                header = parse_header(prefix, size, path)
                data = file.read(size - len(prefix))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise os_error(error, path, "read") from error
        except MemoryError:
            raise Corruption(f"{path}: it claims {size} bytes") from None
        try:
            version = int(header.metadata["version"])
            whole, encoding = header.metadata["whole"], header.metadata["encoding"]
            text, digest = header.metadata["extras"], header.metadata.pop("digest")
        except (KeyError, ValueError) as error:
            raise Corruption(f"{path} is not a hand-over: {error}") from error
        if _digest(header.metadata, data) != digest:
            raise Corruption(f"{path}: its checksum does not match its content")
        entry = header.entry(_IDS, "I64", (-1,), path)
        first = header.length
        ids = np.frombuffer(data[entry.start - first : entry.stop - first], "<i8").astype(np.int64)
        unsaved = None
        if _UNSAVED in header.tensors:
            e = header.entry(_UNSAVED, "F32", (ids.size,), path)
            unsaved = np.frombuffer(data[e.start - first : e.stop - first], "<f4").astype(np.float32)
        tensors = {
            name.removeprefix(_EXTRAS): codec.RawTensor(
                e.dtype, e.shape, data[e.start - first : e.stop - first]
            )
            for name, e in header.tensors.items()
            if name.startswith(_EXTRAS)
        }
        if not 0 < version < pack(MAX_EPOCH, 0) or (ids < 0).any() or (ids[1:] <= ids[:-1]).any():
            raise Corruption(f"{path} is not a hand-over: its fields are impossible")
        if whole and not is_hex(whole, 32):
            raise Corruption(f"{path} is not a hand-over: its name of the whole state is not valid")
        if encoding not in ENCODINGS or (whole and encoding != "exact"):
            raise Corruption(f"{path} is not a hand-over: its encoding is not valid")
        staged = None
        if _VERSIONS in header.tensors:
            v, g = (
                header.entry(n, t, (ids.size,), path) for n, t in ((_VERSIONS, "I64"), (_GENERATION, "U64"))
            )
            versions = np.frombuffer(data[v.start - first : v.stop - first], "<i8").astype(np.int64)
            generation = np.frombuffer(data[g.start - first : g.stop - first], "<u8").astype(np.uint64)
            staged = Staged(ids, versions, generation, self._rows(number))
        tree = codec.decode(text, tensors) if text else None
        return HandOver(number, version, ids, whole, tree, unsaved, encoding, staged)

    def _one(self, number: int) -> HandOver | None:
        """Return one hand-over; None if it is gone, or damaged, which is logged once."""
        try:
            return self.read(number)
        except FileNotFoundError:
            return None  # the persister was faster
        except Corruption as error:
            if number not in self._damaged:
                log.error("a hand-over cannot be read, and is left out: %s", error)
                self._damaged.add(number)
            return None

    def pending(self) -> list[HandOver]:
        """Return all hand-overs. A damaged one is left out, and logged once; its copies stay pending.

        The persister sets it aside: only so it knows that not all of what was handed over is durable.
        """
        return [one for number in self.numbers() if (one := self._one(number)) is not None]

    def take(self, number: int, path: Path) -> None:
        """Give a file of another host's queue its place in this one. Raises OSError."""
        os.replace(path, self._path(number))

    def set_aside(self, number: int) -> None:
        """Rename a damaged hand-over, so that a person can inspect it."""
        path = self._path(number, staged=not os.path.lexists(self._path(number)))
        os.replace(path, path.removesuffix(".safetensors") + ".bad")
        self._rows(number).unlink(missing_ok=True)

    def remove(self, number: int) -> None:
        """Remove a hand-over that is durable, or that a later one replaces."""
        for path in (self._path(number), self._path(number, staged=True), self._rows(number)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def clear(self) -> None:
        """Delete all hand-overs, also damaged ones that were set aside."""
        clear_queue(self._folder)

    def _path(self, number: int, *, staged: bool = False) -> str:
        # A str, because every Path adds its name to a table of the interpreter.
        if number == NEWEST:
            return f"{self._folder}/{MOMENT}"
        return f"{self._folder}/{'staged' if staged else 'handover'}-{number:020d}.safetensors"

    def _rows(self, number: int) -> Path:
        return self._folder / f"{_ROWS}{number:020d}"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise folder_error(error, folder) from error
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _digest(metadata: Mapping[str, str], data: bytes) -> str:
    return hashlib.sha256(canonical(dict(metadata)) + data).hexdigest()


def _publish(temporary: Path, path: str) -> bool:
    """Give a file its name. Return False if another file has that name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path)  # the file system has no hard links
    return True
