"""Map the arena: one file that is the staging buffer, the copy to compare with, and the nearest recovery tier.

    header (4096 bytes) | layout as JSON | arrays of all partitions | arrays of each slot | tensors of each slot

It holds two copies of the state, in two slots (`scarctl.arena.slot`). A memory checkpoint brings the slot that is not
current up to date, as of one step, with its extras (`scarctl.arena.extras`). Last of all one word, `current`, flips. So
whenever the process dies, the current slot is complete, and of one moment. The arena outlives it, and the next process
maps it again. Each partition also has these fields:

    durable    int64    version (epoch, step) that the store has; -1 for none
    saved      int64    moment of that copy, 0 for none; if the current slot's differs, that copy is pending
    wish       int64    twice the number of the newest request that wants it saved, plus 1 if encoded
    distance   float64  distance of the copy from the store's, see `scarctl.arena.distances`; NaN if unknown
    encoding_error      float64, squared error of the parameter in the store's copy if that is encoded; -1 if exact

The owner locks the folder, not the file: views of a map keep its file open, in forked children too, and a lock on the
file would stay as long. One process writes copies, one thread acknowledges them (`scarctl.arena.slots` keeps the two
apart). A copy's moment is written after its bytes, which relies on the order of stores, as x86-64 keeps it. On other
processors the interpreter's locks between the two calls have the same effect.
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

from scarctl.arena.folder import (
    LOCK_SECONDS,
    check_both,
    folder_error,
    lock_folder,
    remove_files,
    reserve,
)
from scarctl.arena.header import (
    EXTRAS,
    FIELDS,
    FIELDS_AT,
    FILE,
    HEADER,
    OWNER,
    SHARED,
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
from scarctl.arena.slot import Slot
from scarctl.arena.slots import Holds, Slots
from scarctl.errors import UsageError
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER, epoch_of, pack, step_of
from scarctl.store.term import Line, number_of
from scarctl.util.arrays import Bytes, Ids, adjacent

log = logging.getLogger("scarctl")

_TEMPORARY = ".arena-new"
BESIDE = (LINE, OWNER, SITE, TOLD, *EXTRAS)
"""Files next to the arena, of no use without it."""


class Arena(Slots):
    """The mapped file described above. Made by `create`, `open_existing`, `share` or `anonymous`.

    `durable`, `saved`, `wish`, `distance`, `encoding_error`: views of the map, of shape (layout.partitions,).
    """

    def __init__(
        self,
        memory: mmap.mmap,
        layout: Layout,
        geometry: Geometry,
        folder: Path | None,
        lock: int,
        file: int = -1,
        *,
        filling: bool = False,
    ) -> None:
        """file: descriptor of the mapped file, closed with this object. filling: see `is_filling`."""
        super().__init__(np.frombuffer(memory, np.int64, len(FIELDS), FIELDS_AT))
        self.layout = layout
        self._folder = folder
        self._lock = lock
        self._memory = memory
        self._geometry = geometry
        self._file = file
        self._filling = filling
        self._closed = weakref.finalize(self, os.close, file) if file >= 0 else None
        self._holds = Holds(self._words, file)
        self._line: LineFile | None = None
        """Set if this process has the store's writer."""
        self.replica_of: str | None = None
        """Host whose arena this was a replica of when it was opened; see `scarctl.arena.kinship.believed`."""
        n, at = layout.partitions, geometry.arrays_at
        ints = {name: np.frombuffer(memory, np.int64, n, at + 8 * n * i) for i, name in enumerate(SHARED)}
        self.durable: Ids = ints["durable"]
        self.saved: Ids = ints["saved"]
        self.wish: Ids = ints["wish"]
        self.distance: NDArray[np.float64] = ints["distance"].view(np.float64)
        self.encoding_error: NDArray[np.float64] = ints["encoding_error"].view(np.float64)
        there = [Slot(i, memory, layout, geometry, self._words) for i in range(len(geometry.slot_arrays_at))]
        self.slots: tuple[Slot, Slot] = there[0], there[-1]
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

        Raises Unavailable (not enough memory: the message has the bytes needed), AccessDenied, Contention (an arena is
        in use), UsageError (an arena exists, without an owner: open it).
        """
        layout_json = json.dumps(layout.to_json(), separators=(",", ":")).encode()
        geometry = Geometry(layout, layout_json)
        temporary, lock, arena = folder / _TEMPORARY, lock_folder(folder), None
        try:
            if os.path.lexists(folder / FILE):
                raise UsageError(f"an arena already exists in {folder}", hint="open it, or remove it")
            for name in BESIDE:
                (folder / name).unlink(missing_ok=True)
            fd = create_file(temporary)
            try:
                rows = (geometry.tensors_at[0], geometry.size) if sparse and COHERENT else None
                reserve(fd, geometry.size, folder, rows)
                memory = map_file(fd, geometry.size, populate=populate)
                write_header(memory, layout, layout_json, geometry, run_id, place)
                arena = cls(
                    memory, layout, geometry, folder, lock, os.dup(fd), filling=not populate and COHERENT
                )
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
        order, so that its words do not show which copies are complete.

        Raises Contention if a live process uses it, AccessDenied if it belongs to another user, Corruption if it is not
        an arena of this store.
        """
        path = folder / FILE
        if not os.path.isdir(folder):
            return None
        lock = lock_folder(folder, patience=patience)
        try:
            # Its pages exist: several threads map them while reading.
            return cls._mapped(path, run_id, folder, lock)
        except FileNotFoundError:
            os.close(lock)
            return None
        except BeforeBoot as error:
            log.warning("%s: its pending copies are lost", error.message)
            for name in (FILE, *BESIDE):
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
            return cls._mapped(folder / FILE, run_id, folder, -1)
        except FileNotFoundError:
            return None

    @classmethod
    def _mapped(cls, path: Path, run_id: str, folder: Path, lock: int) -> Arena:
        fd = open_file(path)
        try:
            layout, geometry = read_header(fd, path, run_id)
            return cls(map_file(fd, geometry.size, populate=False), layout, geometry, folder, lock, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def anonymous(cls, layout: Layout, slots: int = 1) -> Arena:
        """Create an arena without a file, for use in one process. Copies into a single slot are made in place."""
        geometry = Geometry(layout, b"", slots)
        arena = cls(mmap.mmap(-1, geometry.size), layout, geometry, None, -1)
        arena.reset()
        arena.begin_epoch(1, again=True)
        return arena

    def reset(self) -> None:
        """Forget all copies."""
        for slot in self.slots:
            slot.reset()
        self.durable[:] = NEVER
        self.saved[:] = 0
        self.distance[:] = np.nan
        self.encoding_error[:] = -1
        self._clear()
        if self._folder is not None:
            for name in EXTRAS:
                (self._folder / name).unlink(missing_ok=True)

    @property
    def folder(self) -> Path:
        """The arena's folder, where its extras are as well."""
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

    # -- rows -----------------------------------------------------------------------------------------------------

    @property
    def is_filling(self) -> bool:
        """Whether the arena is new: no page is mapped yet, and `put_rows` is faster than writing to `rows`."""
        return self._filling

    def put_rows(self, slot: Slot, g: int, t: int, rows: slice | Ids, data: Bytes) -> None:
        """Assign `data`, uint8 of shape (rows, bytes per row), to some rows of tensor `t` of group `g` of a slot.

        In a new arena adjacent rows are written to the file. Then the system neither clears pages that are overwritten
        at once, nor takes a page fault for each. Fewer bytes than a page gain nothing from this.
        """
        target = slot.rows(g, t)
        inside = not self._filling or data.nbytes < mmap.PAGESIZE
        if inside or not isinstance(rows, slice) or not data.flags.c_contiguous:
            # The bytes that were read into `rows` are in place.
            if not np.may_share_memory(target, data):
                target[rows] = data
            return
        at = slot.place(g, t) + rows.start * target.shape[1]
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
        self._filling = False

    def memory(self) -> Bytes:
        """Return the tensors of both slots in one piece: a writable view, uint8, which begins on a page."""
        at = self._geometry.tensors_at[0]
        return np.frombuffer(self._memory, np.uint8, self._geometry.size - at, at)

    # -- the store ------------------------------------------------------------------------------------------------

    def lifted(self, versions: Ids) -> Ids:
        """Return comparable versions, int64 of any shape: all epochs of this arena's process count as the newest one.

        If the daemon is replaced meanwhile, a copy has an earlier epoch than the commit that makes it durable.
        """
        epochs = epoch_of(versions)
        same = (epochs >= self.base_epoch) & (epochs <= self.epoch)
        return np.where(same, pack(max(self.epoch, 1), 0) | step_of(versions), versions)

    def acknowledge(self, ids: Ids, versions: int | Ids, moments: Ids) -> None:
        """Note that the store has the copies of these partitions: their versions and moments."""
        at = adjacent(ids)
        self.durable[at] = versions
        self.saved[at] = moments

    def mark_all_durable(self) -> None:
        """Note that the state in the current slot is the store's newest one, and is exact there."""
        slot = self.slot
        self.acknowledge(np.arange(self.layout.partitions), slot.version, slot.moments)
        self.encoding_error[:] = -1
        self.seal(slot.head)
        self.keep(slot.moment)
        self.serve(self.asked)

    def note_distances(self, distance: float | NDArray[np.float64], ids: Ids | None = None) -> None:
        """Note the distances from the store's copies of `ids`, or of all partitions; NaN if unknown."""
        self.distance[slice(None) if ids is None else adjacent(ids)] = distance

    def pending(self) -> NDArray[np.bool_]:
        """Return which partitions have a pending copy: bool of shape (layout.partitions,)."""
        return self.slot.differs(self.saved)

    def complete_states(self) -> list[Slot]:
        """Return the slots that have a whole state, the current one first."""
        return [slot for slot in (self.slot, self.spare) if slot.whole and slot.intact().all()]

    def go_back(self) -> None:
        """Make the state in the other slot the newest one, also compared with the store's. Later copies are forgotten.

        Call it before the store is opened for writing, which begins a new epoch.
        """
        later, slot = self.slot, self.spare
        slot.stamp(slot.moment, pack(self.epoch + 1, step_of(slot.head)), slot.whole)
        self._flip(slot.number)
        later.name("")
        self.settle()
        # The store may have copies of the state that is given up.
        self.saved[self.saved > slot.moment] = 0
        self.seal(NEVER)
        self.keep(0)

    def lacking(self) -> bool:
        """Return whether the store lacks something of the current slot: copies, or the extras."""
        return self.slot.moment != self.kept or bool(self.pending().any())

    def adopt(self, *, whole: bool = False) -> None:
        """Ask for everything that the store lacks: a process may have died before it did.

        whole: only if the copies are of one state.
        """
        if self.slot.moment and self.lacking() and (self.whole or not whole):
            self.ask(whole=True)

    def close(self) -> None:
        """Release the lock. The file stays; views stay valid."""
        self._holds.close()
        if self._closed is not None:
            self._closed()
        self._filling, self._file = False, -1
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def remove(self) -> None:
        """Delete the file, and the folder if it is empty then, and close.

        Does nothing after `close`, and in a forked child: another process may own the arena by then.
        """
        if self._folder is not None and self._lock >= 0:
            remove_files(self._folder, (FILE, *BESIDE))
        self.close()


_open_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def _after_fork() -> None:
    # A child that outlives its parent must not keep the lock.
    for arena in list(_open_arenas):
        arena.close()


os.register_at_fork(after_in_child=_after_fork)
