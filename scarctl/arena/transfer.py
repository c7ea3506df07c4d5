"""Send an arena to another host, and receive one: its file in pieces, and the small files that belong to it."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, clear_queue, folder_error, lock_folder, private, reserve
from scarctl.arena.header import FILE, read_header, stamp_boot
from scarctl.arena.kinship import put_aside, take
from scarctl.arena.lines import FILE as LINES
from scarctl.arena.mapping import create_file
from scarctl.errors import Corruption
from scarctl.store import Store
from scarctl.util.arrays import Bytes

log = logging.getLogger("scarctl")

_SMALL = re.compile(rf"handover-[0-9]{{20}}\.safetensors|{LINES}", re.ASCII)
"""Names of files that are sent with an arena. Movements are not sent: extrapolation starts learning again."""
_RECEIVED = ".arena-received"


class Outgoing:
    """An arena that a dead process left, locked while it is sent."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._fd = os.open(arena.folder / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        """Bytes of the arena's file."""
        self._digest = hashlib.sha256()
        self._complete = True

    @classmethod
    def open(cls, store: Store, base: str | None) -> Outgoing | None:
        """Open the arena of this store's run on this host. Return None if no arena belongs to the store.

        base: see `arena_folder`. Raises as `take` does, and Unavailable.
        """
        arena = take(arena_folder(base, store.run_id), store)
        if arena is None:
            return None
        try:
            return cls(arena)
        except OSError as error:
            arena.close()
            raise folder_error(error, arena.folder / FILE) from error

    def head(self) -> dict[str, Any]:
        """Return the size and the small files, for `Incoming`. Call it before `read`. Raises Unavailable."""
        folder = self._arena.folder
        try:
            names = sorted(name for name in os.listdir(folder) if _SMALL.fullmatch(name))
            files = {name: (folder / name).read_bytes() for name in names}
        except OSError as error:
            raise folder_error(error, folder) from error
        for data in files.values():
            self._digest.update(data)
        return {"size": self.size, "files": files}

    def read(self, at: int, size: int) -> Bytes:
        """Return bytes of the arena's file, in order: uint8 of shape (size,). Call it until the file's end.

        After a failure they differ from the file's, which `digest` reports: the receiver waits for them anyway.
        """
        data = np.zeros(size, np.uint8)
        try:
            self._complete &= os.preadv(self._fd, [data], at) == size
        except OSError as error:
            log.warning("%s cannot be read: %s", self._arena.folder / FILE, error.strerror)
            self._complete = False
        self._digest.update(data)
        return data

    def digest(self) -> str:
        """Return the SHA-256 of all bytes, in hex; "" if some could not be read."""
        return self._digest.hexdigest() if self._complete else ""

    def close(self) -> None:
        """Release the arena."""
        os.close(self._fd)
        self._arena.close()


class Incoming:
    """An arena that is being received. It appears in its folder only when it is complete."""

    def __init__(self, store: Store, base: str | None, head: Mapping[str, Any]) -> None:
        """Reserve the space. An existing arena is set aside.

        head: the result of `Outgoing.head`. Raises Contention if the existing arena is in use, Unavailable if there is
        no room, Corruption if the head is malformed.
        """
        self.folder = arena_folder(base, store.run_id)
        size = head.get("size")
        self._files: dict[str, bytes] = dict(head.get("files", {}))
        if type(size) is not int or size <= 0 or not all(map(_SMALL.fullmatch, self._files)):
            raise Corruption(
                "another rank announced something other than an arena", hint="the store is not affected"
            )
        self.size = size
        """Bytes of the arena's file."""
        self._run_id = store.run_id
        self._digest = hashlib.sha256()
        for name in sorted(self._files):
            self._digest.update(self._files[name])
        self._complete = True
        self._lock = lock_folder(self.folder)
        self._fd = -1
        try:
            if os.path.lexists(self.folder / FILE):
                put_aside(self.folder)
                os.close(self._lock)
                self._lock = lock_folder(self.folder)
            self._fd = create_file(self.folder / _RECEIVED)
            reserve(self._fd, self.size, self.folder)
        except BaseException:
            self.close()
            raise

    def write(self, at: int, data: Bytes) -> None:
        """Write bytes of the file, in order. data: uint8 of any length. A failure is raised by `install`."""
        self._digest.update(data)
        try:
            self._complete &= os.pwritev(self._fd, [data], at) == data.size
        except OSError as error:
            log.warning("%s cannot be written: %s", self.folder / _RECEIVED, error.strerror)
            self._complete = False

    def install(self, digest: str) -> None:
        """Give the arena its name. digest: the sender's.

        Raises Corruption if the received bytes differ from those sent, or are not an arena of this run; Unavailable.
        """
        if not self._complete or digest != self._digest.hexdigest():
            raise Corruption("the arena was damaged on its way", hint="the store is not affected")
        stamp_boot(self._fd)
        read_header(self._fd, self.folder / _RECEIVED, self._run_id)
        try:
            clear_queue(self.folder)
            for name, data in self._files.items():
                with open(self.folder / name, "wb", opener=private) as file:
                    file.write(data)
            # In this order a process that is killed meanwhile leaves no arena, and `Arena.create` clears the rest.
            os.rename(self.folder / _RECEIVED, self.folder / FILE)
        except OSError as error:
            raise folder_error(error, self.folder) from error

    def close(self) -> None:
        """Release the folder. An arena that was not installed is deleted."""
        if self._fd >= 0:
            os.close(self._fd)
            (self.folder / _RECEIVED).unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._fd = self._lock = -1
