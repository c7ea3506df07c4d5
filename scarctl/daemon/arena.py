"""The arena: one mapped file that is staging buffer, last-saved cache, and recovery tier in one.

    header (4096 bytes) | layout as JSON | per-partition arrays | tensors

It holds one copy of the state, with every partition as it was last saved. A process that dies leaves it behind, whole:
the next one maps it again. Per partition there are

    generation uint64   odd while a copy is under way, even after it: what a killed process spoiled is known
    version    int64    (epoch, step) of the copy, see `scarctl.version`; -1 when there is none
    durable    int64    version that the store has; a difference means that the copy still waits for the store
    distance   float64  last known distance of the live values from the copy; NaN when unknown

The owner locks the folder, not the file: a map keeps its file open for as long as there are views of it, in forked
children too, and a lock on the file would stay as long.

One process writes copies, one thread acknowledges them. On x86-64 stores become visible in order, which the generations
rely on; elsewhere the interpreter's own locks between the two calls do the same.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.arenafile import (
    FIELDS,
    FIELDS_AT,
    FILE,
    MOVEMENTS,
    BeforeBoot,
    Geometry,
    not_an_arena,
    read_header,
    write_header,
)
from scarctl.daemon.folder import (
    LOCK_SECONDS,
    arena_folder,
    check_both,
    clear_queue,
    folder_error,
    lock_folder,
    reserve,
)
from scarctl.daemon.lines import FILE as LINES
from scarctl.daemon.lines import Lines, Noted, noted
from scarctl.errors import UsageError
from scarctl.layout import Layout
from scarctl.version import NEVER, epoch_of, pack, step_of

__all__ = ["Arena", "arena_folder"]

log = logging.getLogger("scarctl")
Ids = NDArray[np.int64]

_TEMPORARY = ".arena-new"
_CHUNK = 1 << 16
"""Partitions that are looked at together, so that temporaries stay in the cache."""


class Arena:
    """See the module. Made by `create`, `open_existing` or `anonymous`.

    `generation`, `version`, `durable` and `distance` are views of the map, of shape (layout.partitions,).
    """

    def __init__(
        self, memory: mmap.mmap, layout: Layout, geometry: Geometry, folder: Path | None, lock: int
    ) -> None:
        self.layout = layout
        self._folder = folder
        self._lock = lock
        self._memory = memory
        self._geometry = geometry
        self._lines: Lines | None = None
        """Of the store's writer, where this process has it."""
        n, at = layout.partitions, geometry.arrays_at
        self.generation: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, n, at)
        self.version: Ids = np.frombuffer(memory, np.int64, n, at + 8 * n)
        self.durable: Ids = np.frombuffer(memory, np.int64, n, at + 16 * n)
        self.distance: NDArray[np.float64] = np.frombuffer(memory, np.float64, n, at + 24 * n)
        self._fields: Ids = np.frombuffer(memory, np.int64, len(FIELDS), FIELDS_AT)
        if lock >= 0:
            _open_arenas.add(self)

    # -- making and finding -------------------------------------------------------------------------------------

    @classmethod
    def create(cls, folder: Path, layout: Layout, *, run_id: str, epoch: int, place: str = "") -> Arena:
        """A new arena in `folder`, which is made if need be. It appears there only when it is complete.

        place: of the store, for people.

        Hand-overs that lie there without an arena mean nothing any more: they are deleted.

        Raises Unavailable (not enough memory: says how much), AccessDenied, Contention (there is one in use),
        UsageError (there is one that nobody uses: open it).
        """
        layout_json = json.dumps(layout.to_json(), separators=(",", ":")).encode()
        geometry = Geometry(layout, layout_json)
        temporary = folder / _TEMPORARY
        lock = lock_folder(folder)
        try:
            if os.path.lexists(folder / FILE):
                raise UsageError(f"there is an arena in {folder} already", hint="open it, or remove it")
            clear_queue(folder)
            (folder / LINES).unlink(missing_ok=True)
            fd = _open_new(temporary)
            try:
                reserve(fd, geometry.size, folder)
                memory = _map(fd, geometry.size)
            finally:
                os.close(fd)
            write_header(memory, layout, layout_json, geometry, run_id, place)
            arena = cls(memory, layout, geometry, folder, lock)
            arena.reset()
            arena.epoch = epoch
            os.rename(temporary, folder / FILE)
        except BaseException as error:
            os.close(lock)
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise folder_error(error, temporary) from error
            raise
        return arena

    @classmethod
    def open_existing(cls, folder: Path, *, run_id: str, patience: float = LOCK_SECONDS) -> Arena | None:
        """The arena that a run of this store left in `folder`, None when there is none.

        patience: seconds to wait for a live process to let go of it.

        One from before the machine's last start, which on a disk survives, is deleted: its pages were written back in
        any order, so generations say nothing about them.

        Raises Contention when a live process uses it, AccessDenied when it is not ours, Corruption when it is not an
        arena of this store.
        """
        path = folder / FILE
        if not os.path.isdir(folder):
            return None
        lock = lock_folder(folder, patience=patience)
        try:
            fd = _open(path)
            try:
                layout, geometry = read_header(fd, path, run_id)
                return cls(_map(fd, geometry.size), layout, geometry, folder, lock)
            finally:
                os.close(fd)
        except FileNotFoundError:
            os.close(lock)
            return None
        except BeforeBoot as error:
            log.warning("%s: what it had that the store has not is lost", error.message)
            clear_queue(folder)
            (folder / MOVEMENTS).unlink(missing_ok=True)
            path.unlink()
            (folder / LINES).unlink(missing_ok=True)
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def share(cls, folder: Path, *, run_id: str) -> Arena | None:
        """The arena of a live process, mapped by another one that reads copies and acknowledges them. Takes no lock.

        None when there is none. Raises AccessDenied, Corruption as `open_existing`.
        """
        check_both(folder)
        try:
            fd = _open(folder / FILE)
        except FileNotFoundError:
            return None
        try:
            layout, geometry = read_header(fd, folder / FILE, run_id)
            return cls(_map(fd, geometry.size, populate=False), layout, geometry, folder, -1)
        finally:
            os.close(fd)

    @classmethod
    def anonymous(cls, layout: Layout, *, epoch: int = 1) -> Arena:
        """An arena without a file, for one process's use."""
        geometry = Geometry(layout, b"")
        arena = cls(mmap.mmap(-1, geometry.size), layout, geometry, None, -1)
        arena.reset()
        arena.epoch = epoch
        return arena

    def reset(self) -> None:
        """Forget all copies."""
        self.version[:] = NEVER
        self.durable[:] = NEVER
        self.distance[:] = np.nan
        self.pid = os.getpid()
        self.sealed = NEVER
        self.whole = ""

    # -- fields -------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The arena's folder, where hand-overs wait as well."""
        assert self._folder is not None, "an anonymous arena has no folder"
        return self._folder

    @property
    def epoch(self) -> int:
        """Epoch of the process that writes copies."""
        return int(self._fields[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._fields[0] = value

    @property
    def head_step(self) -> int:
        """Iterations that the training process has finished."""
        return int(self._fields[1])

    @head_step.setter
    def head_step(self, value: int) -> None:
        self._fields[1] = value

    @property
    def pid(self) -> int:
        """Process that writes copies."""
        return int(self._fields[2])

    @pid.setter
    def pid(self, value: int) -> None:
        self._fields[2] = value

    @property
    def sealed(self) -> int:
        """Version of the newest sealed commit: what was saved before was equal to the live values then."""
        return int(self._fields[3])

    @sealed.setter
    def sealed(self, value: int) -> None:
        self._fields[3] = value

    @property
    def errors(self) -> int:
        """Faults while saving that the run has counted."""
        return int(self._fields[4])

    @errors.setter
    def errors(self, value: int) -> None:
        self._fields[4] = value

    @property
    def base_epoch(self) -> int:
        """The first epoch of the process that writes copies: a daemon that is replaced meanwhile begins another one."""
        return int(self._fields[5]) or self.epoch

    @base_epoch.setter
    def base_epoch(self, value: int) -> None:
        self._fields[5] = value

    # -- the store that it belongs to: see `scarctl.daemon.kinship` ---------------------------------------------

    @property
    def lines(self) -> Noted:
        """By shard, the line of its log when it was last heard of, and that if the record under way is there."""
        return {} if self._folder is None else noted(self._folder)

    def begin_lines(self, lines: Mapping[int, int]) -> None:
        """See `scarctl.store.line.Companion`. Raises Unavailable when the folder is full."""
        if self._folder is not None:
            self._lines = Lines(self._folder, lines)

    def expect(self, shard: int, line: int) -> None:
        """See `scarctl.store.line.Companion`."""
        if self._lines is not None:
            self._lines.expect(shard, line)

    def note(self, shard: int, line: int) -> None:
        """See `scarctl.store.line.Companion`."""
        if self._lines is not None:
            self._lines.note(shard, line)

    @property
    def whole(self) -> str:
        """Of which commit of the whole state all copies are: 32 hex digits, "" when they are of none.

        Equal versions do not say as much: at one step the state may be saved, changed by no step, and saved again.
        """
        words = self._fields[6:8].astype(">i8").tobytes()
        return words.hex() if any(words) else ""

    @whole.setter
    def whole(self, value: str) -> None:
        # A process that is killed in between leaves words that nobody else has.
        self._fields[6:8] = np.frombuffer(bytes.fromhex(value or "0" * 32), ">i8")

    # -- copies -------------------------------------------------------------------------------------------------

    def rows(self, g: int, t: int) -> NDArray[np.uint8]:
        """Rows of tensor `t` of group `g`: a writable view, uint8 of shape (rows, bytes per row)."""
        spec = self.layout.groups[g].tensors[t]
        flat = np.frombuffer(self._memory, np.uint8, spec.nbytes, self._geometry.tensor_at[g][t])
        return flat.reshape(spec.rows, spec.row_bytes)

    def source(self, g: int, t: int, start: int, stop: int) -> memoryview:
        """Bytes of rows [start, stop) of a tensor, without a copy, for writing a segment."""
        spec = self.layout.groups[g].tensors[t]
        at = self._geometry.tensor_at[g][t]
        return memoryview(self._memory)[at + start * spec.row_bytes : at + stop * spec.row_bytes]

    def memory(self) -> NDArray[np.uint8]:
        """All tensors in one piece: a writable view, uint8 of shape (bytes,), which begins on a page."""
        at = self._geometry.tensors_at
        return np.frombuffer(self._memory, np.uint8, self._geometry.size - at, at)

    def begin(self, ids: Ids) -> None:
        """A copy into these partitions starts: until `end` they are not intact."""
        if len(ids):
            self.whole = ""
        self.generation[ids] |= np.uint64(1)

    def end(self, ids: Ids, version: int) -> None:
        """The copy into these partitions is complete, and is `version`.

        Where the store has that version already, from before what was written now, the copy is pending again.
        """
        self.version[ids] = version
        again = ids[self.durable[ids] == version]
        self.durable[again] = NEVER
        self.generation[ids] += self.generation[ids] & np.uint64(1)

    def newest(self) -> Ids:
        """The version that every copy is good for: its own, or the newest sealed one if that came later."""
        return np.where(self.version >= 0, np.maximum(self.version, self.sealed), np.int64(NEVER))

    def lifted(self, versions: Ids) -> Ids:
        """Versions for comparing, int64 of any shape: what this arena's process has saved counts as of one epoch.

        A copy may be older, by its epoch, than the commit that made it durable: the daemon was replaced in between.
        """
        epochs = epoch_of(versions)
        same = (epochs >= self.base_epoch) & (epochs <= self.epoch)
        return np.where(same, pack(max(self.epoch, 1), 0) | step_of(versions), versions)

    def unseal(self) -> None:
        """Write the sealed version into the partitions, before one of them gets an older copy."""
        newest = self.newest()
        self.durable[:] = np.where(self.durable == self.version, newest, self.durable)
        self.version[:] = newest
        self.sealed = NEVER

    def relabel(self, ids: Ids, version: int) -> None:
        """The copies of these partitions count as `version`, and wait for the store."""
        if len(ids):
            self.whole = ""
        self.version[ids] = version
        self.durable[ids] = NEVER

    def spoil(self, ids: Ids) -> None:
        """The copies of these partitions are no good: as if a process had died while it copied."""
        self.begin(ids)
        self.version[ids] = self.durable[ids]

    def acknowledge(self, ids: Ids, version: int, generation: NDArray[np.uint64] | None = None) -> None:
        """The store has `version` of these partitions, durably.

        generation: of `ids` when they were read for the store. What was copied again since then stays pending, also
        when it is of the same version.
        """
        self.durable[ids] = version
        if generation is not None:
            # Looked at only now: a copy that begins later finds `version` in durable, and `end` takes it back.
            newer = ids[self.generation[ids] != generation]
            self.durable[newer] = NEVER

    def pending(self) -> NDArray[np.bool_]:
        """Partitions whose copy still waits for the store: bool of shape (layout.partitions,)."""
        waiting = np.empty(self.version.size, dtype=bool)
        for first in range(0, waiting.size, _CHUNK):
            part = slice(first, first + _CHUNK)
            version = self.version[part]
            np.logical_and(version != self.durable[part], version >= 0, out=waiting[part])
        return waiting

    def intact(self) -> NDArray[np.bool_]:
        """Partitions that have a complete copy: bool of shape (layout.partitions,)."""
        whole = np.empty(self.version.size, dtype=bool)
        for first in range(0, whole.size, _CHUNK):
            part = slice(first, first + _CHUNK)
            even = (self.generation[part] & np.uint64(1)) == 0
            np.logical_and(even, self.version[part] >= 0, out=whole[part])
        return whole

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the lock. The file stays; views stay valid."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def remove(self) -> None:
        """Delete the file, and the folder when nothing else is in it, then close.

        Does nothing when closed before, or in a forked child: the arena may be another process's by then.
        """
        if self._folder is not None and self._lock >= 0:
            # Nobody looks for movements without an arena: a process may be killed in between.
            (self._folder / MOVEMENTS).unlink(missing_ok=True)
            (self._folder / FILE).unlink(missing_ok=True)
            (self._folder / LINES).unlink(missing_ok=True)
            try:
                os.rmdir(self._folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise folder_error(error, self._folder) from error
        self.close()


def _open(path: Path) -> int:
    """An existing file. Raises FileNotFoundError, AccessDenied; Corruption for what is no plain file."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise folder_error(error, path) from error
        raise not_an_arena(path, error.strerror or "unreadable") from error


def _open_new(path: Path) -> int:
    """A new private file; what a killed process left under this name is replaced."""
    try:
        path.unlink(missing_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise folder_error(error, path) from error


def _map(fd: int, size: int, *, populate: bool = True) -> mmap.mmap:
    # Populated at once: page by page on first touch, the first checkpoint would take several times as long. But the
    # daemon has time, and somebody may wait for it to open.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _after_fork() -> None:
    # A child that outlives its parent must not keep the lock.
    for arena in list(_open_arenas):
        arena.close()


os.register_at_fork(after_in_child=_after_fork)
