"""Map the arena: one file that is the staging buffer, the copy to compare with, and the nearest recovery tier.

    header (4096 bytes) | layout as JSON | per-partition arrays | tensors

It holds one copy of the state: every partition as it was last saved. It outlives a process that dies, and the next
process maps it again. Each partition has these fields:

    generation uint64   odd during a copy, and after it if the process died, so that torn copies are known
    version    int64    (epoch, step) of the copy, see `scarctl.state.version`; -1 without a copy
    durable    int64    version that the store has; if it differs, the copy is pending
    distance   float64  distance of the copy from the store's, see `scarctl.arena.distances`; NaN if unknown
    encoding_error      float64, squared error of the parameter in the store's copy if that is encoded; -1 if exact

The owner locks the folder, not the file: views of a map keep its file open, in forked children too, and a lock on the
file would stay as long. One process writes copies, one thread acknowledges them. The generations rely on the order of
stores, which x86-64 keeps. On other processors the interpreter's locks between the two calls have the same effect.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.fields import Fields
from scarctl.arena.folder import (
    LOCK_SECONDS,
    check_both,
    clear_queue,
    folder_error,
    lock_folder,
    remove_files,
    reserve,
)
from scarctl.arena.header import (
    FIELDS,
    FIELDS_AT,
    FILE,
    HEADER,
    MOMENT,
    OWNER,
    SITE,
    TOLD,
    BeforeBoot,
    Geometry,
    read_header,
    write_header,
)
from scarctl.arena.line import FILE as LINE
from scarctl.arena.line import LineFile, Word, noted
from scarctl.arena.mapping import COHERENT, create_file, map_file, open_file, write_at
from scarctl.errors import UsageError
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER, epoch_of, pack, step_of
from scarctl.store.term import Line, number_of
from scarctl.util.arrays import Bytes, Ids, adjacent

log = logging.getLogger("scarctl")

_TEMPORARY = ".arena-new"
_CHUNK = 1 << 16
"""Partitions that are processed together, so that temporary arrays stay in the cache."""


class Arena(Fields):
    """The mapped file described above. Made by `create`, `open_existing`, `share` or `anonymous`.

    `generation`, `version`, `durable`, `distance`, `encoding_error`: views of the map, of shape (layout.partitions,).
    """

    def __init__(
        self, memory: mmap.mmap, layout: Layout, geometry: Geometry, folder: Path | None, lock: int
    ) -> None:
        self.layout = layout
        self._folder = folder
        self._lock = lock
        self._memory = memory
        self._geometry = geometry
        self._file = -1
        """File descriptor of a new arena whose pages are not mapped yet; see `put_rows`."""
        self._line: LineFile | None = None
        """Set if this process has the store's writer."""
        self.replica_of: str | None = None
        """Host whose arena this was a replica of when it was opened; see `scarctl.arena.kinship.believed`."""
        n, at = layout.partitions, geometry.arrays_at
        self.generation: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, n, at)
        self.version: Ids = np.frombuffer(memory, np.int64, n, at + 8 * n)
        self.durable: Ids = np.frombuffer(memory, np.int64, n, at + 16 * n)
        self.distance: NDArray[np.float64] = np.frombuffer(memory, np.float64, n, at + 24 * n)
        self.encoding_error: NDArray[np.float64] = np.frombuffer(memory, np.float64, n, geometry.errors_at)
        super().__init__(np.frombuffer(memory, np.int64, len(FIELDS), FIELDS_AT))
        if lock >= 0:
            _open_arenas.add(self)

    @classmethod
    def create(
        cls,
        folder: Path,
        layout: Layout,
        *,
        run_id: str,
        epoch: int,
        place: str = "",
        populate: bool = True,
        sparse: bool = False,
    ) -> Arena:
        """Create an arena in `folder`, and the folder if it is missing. The file appears only when it is complete.

        place: address of the store, for display. populate: see `map_file`.
        sparse: rows get no space yet. Write them with `scarctl.arena.rows.write_rows`, and then call `reserve_rows`.
        Hand-overs in a folder without an arena are obsolete, and deleted.

        Raises Unavailable (not enough memory: the message has the bytes needed), AccessDenied, Contention (an arena is
        in use), UsageError (an arena exists, without an owner: open it).
        """
        layout_json = json.dumps(layout.to_json(), separators=(",", ":")).encode()
        geometry = Geometry(layout, layout_json)
        temporary, lock, arena = folder / _TEMPORARY, lock_folder(folder), None
        try:
            if os.path.lexists(folder / FILE):
                raise UsageError(f"an arena already exists in {folder}", hint="open it, or remove it")
            clear_queue(folder)
            (folder / LINE).unlink(missing_ok=True)
            (folder / OWNER).unlink(missing_ok=True)
            fd = create_file(temporary)
            try:
                rows = (geometry.tensors_at, geometry.errors_at) if sparse and COHERENT else None
                reserve(fd, geometry.size, folder, rows)
                memory = map_file(fd, geometry.size, populate=populate)
                write_header(memory, layout, layout_json, geometry, run_id, place)
                arena = cls(memory, layout, geometry, folder, lock)
                if not populate and COHERENT:
                    arena._file = os.dup(fd)
            finally:
                os.close(fd)
            arena.reset()
            arena.begin_epoch(epoch, again=True)
            os.rename(temporary, folder / FILE)
        except BaseException as error:
            os.close(lock) if arena is None else arena.close()
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise folder_error(error, temporary) from error
            raise
        return arena

    @classmethod
    def open_existing(cls, folder: Path, *, run_id: str, patience: float = LOCK_SECONDS) -> Arena | None:
        """Open the arena of a dead run of this store in `folder`; None if the folder has no arena.

        patience: seconds to wait for a live process to release it.
        An arena from before the last boot, which may survive on a disk, is deleted. Its pages were written back in any
        order, so that generations do not show which copies are intact.

        Raises Contention if a live process uses it, AccessDenied if it belongs to another user, Corruption if it is not
        an arena of this store.
        """
        path = folder / FILE
        if not os.path.isdir(folder):
            return None
        lock = lock_folder(folder, patience=patience)
        try:
            fd = open_file(path)
            try:
                layout, geometry = read_header(fd, path, run_id)
                # Its pages exist: several threads map them while reading.
                return cls(map_file(fd, geometry.size, populate=False), layout, geometry, folder, lock)
            finally:
                os.close(fd)
        except FileNotFoundError:
            os.close(lock)
            return None
        except BeforeBoot as error:
            log.warning("%s: its pending copies are lost", error.message)
            clear_queue(folder)
            for name in (FILE, LINE, OWNER, SITE, TOLD):
                (folder / name).unlink(missing_ok=True)
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def share(cls, folder: Path, *, run_id: str) -> Arena | None:
        """Map the arena of a live process, to read and acknowledge copies; None without an arena. Takes no lock.

        Raises AccessDenied, Corruption as `open_existing`.
        """
        check_both(folder)
        try:
            fd = open_file(folder / FILE)
        except FileNotFoundError:
            return None
        try:
            layout, geometry = read_header(fd, folder / FILE, run_id)
            return cls(map_file(fd, geometry.size, populate=False), layout, geometry, folder, -1)
        finally:
            os.close(fd)

    @classmethod
    def anonymous(cls, layout: Layout) -> Arena:
        """Create an arena without a file, for use in one process."""
        geometry = Geometry(layout, b"")
        arena = cls(mmap.mmap(-1, geometry.size), layout, geometry, None, -1)
        arena.reset()
        arena.begin_epoch(1, again=True)
        return arena

    def reset(self) -> None:
        """Forget all copies."""
        self.version[:] = NEVER
        self.durable[:] = NEVER
        self.distance[:] = np.nan
        self.encoding_error[:] = -1
        self._clear()

    @property
    def folder(self) -> Path:
        """The arena's folder, where hand-overs wait as well."""
        assert self._folder is not None, "an anonymous arena has no folder"
        return self._folder

    def moved_to(self, folder: Path) -> None:
        """Note that the folder was renamed."""
        self._folder = folder

    # -- the store of the arena: see `scarctl.arena.kinship` ----------------------------------------------------

    @property
    def line(self) -> Word | None:
        """What the writer of this arena's copies has saved: see `scarctl.arena.line`."""
        return None if self._folder is None else noted(self._folder)

    def begin_line(self, own: Line, base: Line) -> None:
        """See `scarctl.store.writer.Companion`. Raises Unavailable if the folder is full."""
        if self._folder is not None:
            word = Word(number_of(own.id), own.k, number_of(base.id), base.k)
            self._line = LineFile(self._folder, word)

    def note(self, own: Line) -> None:
        """See `scarctl.store.writer.Companion`."""
        if self._line is not None:
            self._line.note(own.k)

    def layout_json(self) -> bytes:
        """Return the layout as the file has it."""
        return bytes(self._memory[HEADER : self._geometry.arrays_at]).rstrip(b"\0")

    def rows(self, g: int, t: int) -> NDArray[np.uint8]:
        """Return the rows of tensor `t` of group `g`: a writable view, uint8 of shape (rows, bytes per row)."""
        spec, at = self.layout.groups[g].tensors[t], self._geometry.tensor_at[g][t]
        return np.frombuffer(self._memory, np.uint8, spec.nbytes, at).reshape(spec.rows, spec.row_bytes)

    @property
    def is_filling(self) -> bool:
        """Whether the arena is new: no page is mapped yet, and `put_rows` is faster than writing to `rows`."""
        return self._file >= 0

    def put_rows(self, g: int, t: int, rows: slice | Ids, data: Bytes) -> None:
        """Assign `data`, uint8 of shape (rows, bytes per row), to some rows of tensor `t` of group `g`.

        In a new arena adjacent rows are written to the file. Then the system neither clears pages that are overwritten
        at once, nor takes a page fault for each. Fewer bytes than a page gain nothing from this.
        """
        target = self.rows(g, t)
        inside = self._file < 0 or data.nbytes < mmap.PAGESIZE
        if inside or not isinstance(rows, slice) or not data.flags.c_contiguous:
            # The bytes that were read into `rows` are in place.
            if not np.may_share_memory(target, data):
                target[rows] = data
            return
        at = self._geometry.tensor_at[g][t] + rows.start * target.shape[1]
        write_at(self._file, at, memoryview(data.reshape(-1)), self.folder / FILE)

    def reserve_rows(self) -> None:
        """Reserve the space of rows that no one has written. Raises Unavailable (`kind` "arena-full")."""
        if not COHERENT:
            return  # `create` has reserved it, with zeros
        fd = open_file(self.folder / FILE)
        try:
            reserve(fd, self._geometry.size, self.folder)
        finally:
            os.close(fd)

    def end_filling(self) -> None:
        """Write to the mapped pages from now on."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def source(self, g: int, t: int, start: int, stop: int) -> memoryview:
        """Return the bytes of rows [start, stop) of a tensor, without a copy, for writing a segment."""
        spec, at = self.layout.groups[g].tensors[t], self._geometry.tensor_at[g][t]
        return memoryview(self._memory)[at + start * spec.row_bytes : at + stop * spec.row_bytes]

    def memory(self) -> NDArray[np.uint8]:
        """Return all tensors in one piece: a writable view, uint8 of shape (bytes,), which begins on a page."""
        at, end = self._geometry.tensors_at, self._geometry.errors_at
        return np.frombuffer(self._memory, np.uint8, end - at, at)

    def place_of(self, rows: Bytes) -> int:
        """Return the offset in the file of a view of `memory`."""
        return self._geometry.tensors_at + rows.ctypes.data - self.memory().ctypes.data

    def offset(self, g: int, t: int) -> int:
        """Return the offset of tensor `t` of group `g` in `memory`: a multiple of 64 bytes."""
        return self._geometry.tensor_at[g][t] - self._geometry.tensors_at

    def begin(self, ids: Ids) -> None:
        """Begin a copy into these partitions: until `end` they are not intact."""
        if len(ids):
            self.name_whole("")
        self.generation[adjacent(ids)] |= np.uint64(1)

    def end(self, ids: Ids, version: int) -> None:
        """End the copy into these partitions, which is of `version`.

        If the store has an earlier copy of the same version, the new copy is pending.
        """
        at = adjacent(ids)
        self.version[at] = version
        again = self.durable[at] == version
        if again.any():
            self.durable[ids[again]] = NEVER
        self.generation[at] += self.generation[at] & np.uint64(1)

    def newest(self) -> Ids:
        """Return the newest version whose values each copy has: int64 (partitions,).

        That is its own, or that of a later seal or memory checkpoint, which has found it unchanged.
        """
        newest = np.maximum(self.version, max(self.sealed, self.moment))
        return np.where(self.version >= 0, newest, np.int64(NEVER))

    def lifted(self, versions: Ids) -> Ids:
        """Return comparable versions, int64 of any shape: all epochs of this arena's process count as the newest one.

        If the daemon is replaced meanwhile, a copy has an earlier epoch than the commit that makes it durable.
        """
        epochs = epoch_of(versions)
        same = (epochs >= self.base_epoch) & (epochs <= self.epoch)
        return np.where(same, pack(max(self.epoch, 1), 0) | step_of(versions), versions)

    def unseal(self) -> None:
        """Write the version of the newest seal or moment into the partitions, before one of them gets an older copy."""
        newest = self.newest()
        self.durable[:] = np.where(self.durable == self.version, newest, self.durable)
        self.version[:] = newest
        self.seal(NEVER)
        self.note_moment(NEVER)

    def relabel(self, ids: Ids, version: int) -> None:
        """Label the copies of these partitions as `version`, and as pending."""
        if len(ids):
            self.name_whole("")
        self.version[ids] = version
        self.durable[ids] = NEVER

    def spoil(self, ids: Ids) -> None:
        """Mark the copies of these partitions as torn, as if a process had died while copying."""
        self.begin(ids)
        self.version[ids] = self.durable[ids]

    def acknowledge(self, ids: Ids, version: int | Ids, generation: NDArray[np.uint64] | None = None) -> None:
        """Note that `version`, one for all or one for each, of these partitions is durable.

        generation: those of `ids` when they were read. What was copied since stays pending, even at the same version.
        """
        self.durable[adjacent(ids)] = version
        if generation is not None:
            # Read after `durable` was written: a copy that begins later finds `version` in it, and `end` resets it.
            newer = (self.generation[ids] != generation) & (self.version[ids] == version)
            self.durable[ids[newer]] = NEVER

    def confirm(self, ids: Ids, versions: Ids) -> None:
        """Note that the copies of these partitions are durable, as of `versions` (int64, one for each)."""
        self.version[ids] = versions
        self.durable[ids] = versions

    def mark_all_durable(self, whole: str) -> None:
        """Note, after a rollback, that the store's newest state is the arena's: the commit `whole`."""
        self.durable[:], self.encoding_error[:] = self.version, -1  # what is sealed is exact
        self.seal(NEVER)
        self.note_moment(NEVER)
        self.name_whole(whole)

    def relabel_all(self, current: NDArray[np.bool_], waiting: NDArray[np.bool_], epoch: int) -> None:
        """Count the copies `current` as saved in `epoch`, at their steps, and forget the others.

        current, waiting: bool of shape (layout.partitions,). All copies but `waiting` are durable.
        """
        self.version[:] = np.where(current, pack(epoch, 0) | step_of(self.version), NEVER)
        self.durable[:] = np.where(waiting, NEVER, self.version)

    def note_distances(self, distance: float | NDArray[np.float64], ids: Ids | None = None) -> None:
        """Note the distances from the store's copies of `ids`, or of all partitions; NaN if unknown."""
        self.distance[slice(None) if ids is None else adjacent(ids)] = distance

    def pending(self) -> NDArray[np.bool_]:
        """Return which partitions have a pending copy: bool of shape (layout.partitions,)."""
        waiting = np.empty(self.version.size, dtype=bool)
        for first in range(0, waiting.size, _CHUNK):
            part = slice(first, first + _CHUNK)
            waiting[part] = (self.version[part] != self.durable[part]) & (self.version[part] >= 0)
        return waiting

    def intact(self) -> NDArray[np.bool_]:
        """Return which partitions have a complete copy: bool of shape (layout.partitions,)."""
        whole = np.empty(self.version.size, dtype=bool)
        for first in range(0, whole.size, _CHUNK):
            part = slice(first, first + _CHUNK)
            whole[part] = ((self.generation[part] & np.uint64(1)) == 0) & (self.version[part] >= 0)
        return whole

    def close(self) -> None:
        """Release the lock. The file stays; views stay valid."""
        self.end_filling()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def remove(self) -> None:
        """Delete the file, and the folder if it is empty then, and close.

        Does nothing after `close`, and in a forked child: another process may own the arena by then.
        """
        if self._folder is not None and self._lock >= 0:
            remove_files(self._folder, (FILE, LINE, OWNER, MOMENT, SITE, TOLD))
        self.close()


_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _after_fork() -> None:
    # A child that outlives its parent must not keep the lock.
    for arena in list(_open_arenas):
        arena.close()


os.register_at_fork(after_in_child=_after_fork)
