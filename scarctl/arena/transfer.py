"""Send an arena to another host, and receive one: its file in pieces, and the small files that belong to it.

Only the current slot is sent. The other one is blank where the arena arrives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash

from scarctl.arena.arena import Arena
from scarctl.arena.folder import (
    arena_folder,
    folder_error,
    lock_folder,
    no_links,
    private,
    require_free,
    reserve,
)
from scarctl.arena.header import EXTRAS, FILE, naturalize
from scarctl.arena.kinship import put_aside, take, with_room
from scarctl.arena.line import FILE as LINE
from scarctl.arena.mapping import create_file
from scarctl.arena.owner import Owner, write_owner
from scarctl.arena.view import ArenaView, peek_in
from scarctl.errors import Corruption, ScarError
from scarctl.state.version import MAX_EPOCH, MAX_STEP, NEVER, pack
from scarctl.store import Store
from scarctl.util.arrays import Bytes

log = logging.getLogger("scarctl")

PIECE = 8 << 20
"""Bytes that are sent at a time."""
INCOMING = ".incoming"
"""Suffix of the folder in which an arena is received until it is complete."""
_SMALL = re.compile("|".join(map(re.escape, (*EXTRAS, LINE))), re.ASCII)
"""Names of files that are sent with an arena."""
_RECEIVED = ".arena-received"

Gap: TypeAlias = "tuple[int, int]"
"""Where the tensors of the slot that is not sent begin in the arena's file, and their bytes."""


class Outgoing:
    """An arena that a dead process left, locked while it is sent."""

    def __init__(self, arena: Arena, *, most: int | None = None) -> None:
        """Prepare. The arena stays open, and so locked, until `close`.

        most: bytes of the largest small file that can be sent; larger ones are left out, with a warning.

        Raises Unavailable, AccessDenied.
        """
        self._arena = arena
        self._owned: Arena | None = None
        self._digest = xxhash.xxh3_128()
        self._complete = True
        self._buffer = np.empty(0, np.uint8)
        folder = arena.folder
        try:
            sizes = {
                name: os.stat(folder / name, follow_symlinks=False).st_size
                for name in sorted(os.listdir(folder))
                if _SMALL.fullmatch(name) and name != EXTRAS[arena.spare.number]
            }
            self._fd = os.open(folder / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise folder_error(error, folder) from error
        self.withheld = [name for name, size in sizes.items() if most is not None and size > most]
        """Names of small files that are left out."""
        if self.withheld:
            log.warning("%s: the extras are too large to be sent", folder)
        self._files = {name: size for name, size in sizes.items() if name not in self.withheld}
        self.gap = _gap_of(arena)
        self.size = os.fstat(self._fd).st_size - self.gap[1]
        """Bytes of the arena's file that are sent."""

    @classmethod
    def open(cls, store: Store, base: str | None) -> Outgoing | None:
        """Open the arena of this store's run on this host. Return None if no arena belongs to the store.

        base: see `arena_folder`. Raises as `take` does, and Unavailable.
        """
        arena = take(arena_folder(base, store.run_id), store)
        if arena is None:
            return None
        try:
            made = cls(arena)
        except BaseException:
            arena.close()
            raise
        made._owned = arena
        return made

    @property
    def count(self) -> int:
        """Number of the small files."""
        return len(self._files)

    @property
    def files_size(self) -> int:
        """Bytes of the small files."""
        return sum(self._files.values())

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents of the small files, for `Incoming.keep`, before `read`. Raises Unavailable."""
        for name in self._files:
            path = self._arena.folder / name
            try:
                with open(path, "rb", opener=no_links) as file:
                    data = file.read()
            except OSError as error:
                raise folder_error(error, path) from error
            _digest_file(self._digest, name, data)
            yield name, data

    def read(self, at: int, size: int) -> Bytes:
        """Return bytes that are sent of the file, in order: uint8 of shape (size,), valid until the next call.

        Call it until their end. After a failure the bytes differ from the file's, which `digest` reports: the
        receiver waits for them anyway.
        """
        if self._buffer.size < size:
            self._buffer = np.zeros(size, np.uint8)
        data = self._buffer[:size]
        try:
            for where, part in _places(at, size, self.gap):
                self._complete &= os.preadv(self._fd, [data[part]], where) == data[part].size
        except OSError as error:
            log.warning("%s cannot be read: %s", self._arena.folder / FILE, error.strerror)
            self._complete = False
        self._digest.update(data)
        return data

    def digest(self) -> str:
        """Return the XXH3 (128 bits) of all bytes, in hex; "" if some were not read. It shows damage, not malice."""
        return self._digest.hexdigest() if self._complete else ""

    def close(self) -> None:
        """End reading, and release the arena if `open` has opened it."""
        os.close(self._fd)
        if self._owned is not None:
            self._owned.close()


class Incoming:
    """An arena that is being received, next to its place. It takes the place when it is complete and verified.

    An arena in the place stays until then, locked, and is set aside: see `scarctl.arena.kinship.put_aside`.
    """

    def __init__(self, store: Store, base: str | None, size: int, files_size: int, gap: Gap) -> None:
        """Reserve the space.

        size: bytes of the arena's file that are sent. files_size: bytes of the small files. gap: see `Outgoing`.

        Raises Contention if the existing arena is in use, Unavailable (`kind` "arena-full") if there is no room.
        """
        assert size >= 0
        assert files_size >= 0
        self.folder = arena_folder(base, store.run_id)
        self.size = size
        """Bytes of the arena's file that are sent."""
        self._gap = gap
        self._growing = self.folder.with_name(self.folder.name + INCOMING)
        self._run_id = store.run_id
        self._digest = xxhash.xxh3_128()
        self._complete = True
        self._left = files_size
        self._fd = self._growing_lock = -1
        self._lock = lock_folder(self.folder)
        try:
            self._growing_lock = lock_folder(self._growing)
            self._clear()  # what a killed process has left
            self._fd = create_file(self._growing / _RECEIVED)
            with_room(self.folder, lambda: self._reserve(size + gap[1], files_size))
        except BaseException:
            self.close()
            raise

    def _reserve(self, size: int, files_size: int) -> None:
        # Asked first: a size that no file can have might be refused differently, or be written byte by byte.
        require_free(self._growing, size + files_size)
        if size:
            reserve(self._fd, size, self._growing)

    def keep(self, name: str, data: bytes | Bytes) -> None:
        """Keep a small file of the arena, in the order of `Outgoing.files`, before `write`.

        Raises Corruption for any other file, or more bytes than announced; Unavailable.
        """
        self._left -= len(data)
        if not _SMALL.fullmatch(name) or self._left < 0:
            raise Corruption(
                "another host sends something other than an arena", hint="the store is not affected"
            )
        _digest_file(self._digest, name, data)
        try:
            with open(self._growing / name, "xb", opener=private) as file:
                file.write(data)
        except OSError as error:
            raise folder_error(error, self._growing / name) from error

    def write(self, at: int, data: Bytes) -> None:
        """Write bytes of the file, as `Outgoing.read` returns them. A failure is raised by `install`."""
        self._digest.update(data)
        self._complete &= at + data.size <= self.size
        try:
            for where, part in _places(at, data.size, self._gap) if self._complete else ():
                self._complete &= os.pwritev(self._fd, [data[part]], where) == data[part].size
        except OSError as error:
            log.warning("%s cannot be written: %s", self._growing, error.strerror)
            self._complete = False

    def install(
        self,
        digest: str,
        owner: Owner | None = None,
        check: Callable[[ArenaView], None] = lambda view: None,
    ) -> None:
        """Give the arena its place. An earlier one there is set aside.

        digest: the sender's. owner: if the arena is a replica here, whose.
        check: called before that; raises an error if this arena is not the one that was asked for.

        Raises Corruption if the received bytes differ from those sent, or are not an arena of this run; Unavailable.
        The earlier arena then stays.
        """
        if not self._complete or digest != self._digest.hexdigest():
            raise Corruption("the arena was damaged on its way", hint="the store is not affected")
        path = self._growing / _RECEIVED
        naturalize(self._fd)
        try:
            os.rename(path, self._growing / FILE)
        except OSError as error:
            raise folder_error(error, path) from error
        arena = Arena.share(self._growing, run_id=self._run_id)
        if arena is None or _gap_of(arena) != self._gap:
            raise Corruption(f"{path} is of another slot than announced", hint="the store is not affected")
        arena.spare.reset()
        arena.close()
        view = peek_in(self._growing, self._run_id)
        if view is None or not _possible(view):
            raise Corruption(
                f"{path} has impossible versions of its copies", hint="the store is not affected"
            )
        check(view)
        if owner is not None:
            write_owner(self._growing, owner)
        if os.path.lexists(self.folder / FILE):
            put_aside(self.folder, self._growing)
            return
        try:
            for obsolete in self.folder.iterdir():  # files without an arena
                obsolete.unlink()
            os.rename(self._growing, self.folder)
        except OSError as error:
            raise folder_error(error, self.folder) from error

    def close(self) -> None:
        """Release the folder. An arena that was not installed is deleted."""
        if self._fd >= 0:
            os.close(self._fd)
        if self._growing_lock >= 0:
            # The lock follows an installed arena to its place: then there is no folder of this name.
            shutil.rmtree(self._growing, ignore_errors=True)
            os.close(self._growing_lock)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)  # if this made it
            os.close(self._lock)
        self._fd = self._growing_lock = self._lock = -1

    def _clear(self) -> None:
        for path in self._growing.iterdir():
            path.unlink()


def sweep_incoming(folder: Path) -> None:
    """Delete incomplete arenas that killed processes have left in the host folder. Failures are logged."""
    for path in folder.glob(f"*{INCOMING}"):
        try:
            lock = lock_folder(path, patience=0.0)
        except ScarError as error:
            log.info("%s stays: %s", path, error)
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _digest_file(digest: xxhash.xxh3_128, name: str, data: bytes | Bytes) -> None:
    digest.update(f"{name} {len(data)} ".encode())
    digest.update(data)


def _gap_of(arena: Arena) -> Gap:
    rows = arena.spare.memory()
    return arena.spare.place_of(rows), rows.size


def _places(at: int, size: int, gap: Gap) -> Iterator[tuple[int, slice]]:
    """Yield where some of the bytes that are sent are in the file, and which of them: [at, at + size) of all."""
    before = max(0, min(size, gap[0] - at))
    yield at, slice(0, before)
    yield at + before + gap[1], slice(before, size)


def _possible(view: ArenaView) -> bool:
    """Return whether a run can have written these versions."""
    newest = pack(MAX_EPOCH, MAX_STEP)
    return all(bool(((a >= NEVER) & (a <= newest)).all()) for a in (view.version, view.durable)) and bool(
        (view.moments >= 0).all()
    )
