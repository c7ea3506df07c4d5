"""Write a replica: the arena of a run that lives on another host, from the frames of its owner's daemon.

A new replica grows in a folder next to its place. With its first mark it is complete, and takes the place; until then
an older one stays there. Copies are written into the slot that is not current, as those of the owner's moments. A mark
makes that slot current, with the extras and the counters that belong to it.

The folder is locked only for each change. So a session or a survivor takes the arena when necessary. The replica then
has no owner (`arena.owner`), which the next change notices.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.extras import carry_extras, parse_extras, put_file
from scarctl.arena.folder import folder_error, lock_folder
from scarctl.arena.header import EXTRAS, FILE, OWNER
from scarctl.arena.kinship import put_aside, replace_folder
from scarctl.arena.line import write_line
from scarctl.arena.mapping import populate
from scarctl.arena.owner import Owner, read_owner, write_owner
from scarctl.arena.rows import write_rows
from scarctl.arena.transfer import sweep_incoming
from scarctl.errors import Corruption, Fenced, ScarError, Unavailable
from scarctl.peers.frames import Batch, Mark
from scarctl.state.layout import Layout
from scarctl.store.format import MAX_LAYOUT_VALUES, parse_json
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")

SUCCESSOR = ".successor"
"""Suffix of the folder in which a replica grows until it is complete."""
_MAPPED_AT_ONCE = 4 << 20
"""Bytes: about a millisecond, for which a frame may wait."""
RUN_ID = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{16})?-[0-9]{1,6}", re.ASCII)
"""The id of a run that is one of several: a rank's, or a member's."""


class Replica:
    """One run's replica on this host. Made by `begin`; all calls are of one thread."""

    def __init__(self, place: Path, folder: Path, arena: Arena, owner: Owner) -> None:
        self.owner = owner
        self.arena = arena
        self.complete = folder == place
        """Whether the replica has its place, so that recovery finds it."""
        self._place, self._folder = place, folder
        self._inode = os.stat(folder / FILE).st_ino
        self._checked: tuple[int, ...] | None = None
        """Result of `_identity` when the owner's file was last read."""
        self._mapped = 0
        """Bytes of rows that `map_more` has mapped."""
        self._extras: bytes | None = None
        """The file with the extras of the coming mark, empty if it has none; None: nothing was sent."""
        self._written = arena.spare.intact() & (not arena.slot.moment)
        """Which copies in the slot that is not current belong to the coming mark: bool of shape (partitions,)."""

    @classmethod
    def begin(cls, base: Path, run: str, layout_json: bytes, owner: Owner, epoch: int, store: str) -> Replica:
        """Begin a replica, or continue the same owner's. There is room for it on return; its first copies take it.

        base: the host's folder. layout_json: as in the owner's arena. epoch: the owner's epoch.
        store: address of the store, for display.

        Raises Fenced if this host has seen a later epoch of the run; Unavailable (`kind` "arena-full") without room.
        Raises Contention if a live process uses the place; Corruption, AccessDenied.
        """
        if not RUN_ID.fullmatch(run):
            raise Corruption(f"a peer names a run that is not a rank's: {run!r:.80}")
        place = base / run
        require_newest(place, run, owner, epoch)
        try:
            layout = Layout.from_json(parse_json(layout_json, "a peer's layout", values=MAX_LAYOUT_VALUES))
        except RecursionError as error:
            raise Corruption(f"a peer's layout cannot be read: {error}") from error
        growing = place.with_name(place.name + SUCCESSOR)
        require_newest(growing, run, owner, epoch)
        for folder in (place, growing):
            if read_owner(folder) == owner and (arena := _continued(folder, run, layout)) is not None:
                return cls(place, folder, arena, owner)
        if os.path.lexists(growing):
            _remove(growing)
        arena = Arena.create(
            growing, layout, run_id=run, epoch=owner.base_epoch, place=store, populate=False, sparse=True
        )
        try:
            arena.take_over(0)  # no process of this host writes to it
            arena.begin_epoch(owner.base_epoch)
            write_owner(growing, owner)
        except BaseException:
            _remove(growing)
            raise
        finally:
            arena.close()
        return cls(place, growing, arena, owner)

    def have(self) -> list[Ids]:
        """Return the moment of every copy, 0 for none, and that of the store's: int64."""
        arena = self.arena
        return [np.where(self._written, arena.spare.moments, arena.moments), arena.saved.copy()]

    def apply(self, batch: Batch, *, rows: bool) -> None:
        """Copy a verified batch. rows: with its rows; otherwise only what the store has of copies that are here.

        Raises Fenced if the replica was taken, Corruption if the batch has another size than its copies. Raises
        Unavailable (`kind` "arena-full") if others have taken the room of a new replica, which is then removed.
        """
        arena, ids = self.arena, batch.ids
        if batch.data.size != (int(arena.layout.partition_bytes[ids].sum()) if rows else 0):
            raise Corruption("a batch has another size than its copies")
        if not rows and (self.have()[0][ids] != batch.moments).any():
            raise Corruption("a peer describes copies that were never sent")
        with self._held():
            if rows:
                spare = arena.spare
                spare.name("")  # it has copies of several states
                spare.begin(ids)
                with self._growing():
                    write_rows(spare, ids, batch.data, None if self.complete else self._folder / FILE)
                spare.end(ids, batch.version, batch.moments)
                self._written[ids] = True
            arena.acknowledge(ids, batch.durable, batch.saved)
            arena.note_distances(batch.distance, ids)

    def map_more(self) -> bool:
        """Map some pages of a complete replica, so that later copies take no page faults. Return whether more are left.

        First copies are written to the file, because mapping its pages would double the time that they take.
        """
        memory, first = self.arena.memory(), self._mapped
        if not self.complete or first >= memory.size:
            return False
        self._mapped += _MAPPED_AT_ONCE
        populate(memory[first : self._mapped])
        return self._mapped < memory.size

    def keep(self, data: bytes) -> None:
        """Keep the file with the extras of the coming mark, empty if it has none. Raises Corruption."""
        if data:
            parse_extras(data, "a peer's extras")
        self._extras = data

    def mark(self, mark: Mark) -> None:
        """Make what was sent the replica's state, with the counters of the owner's arena. Then the replica is complete.

        Raises Fenced, Corruption, Unavailable, Contention.
        """
        if mark.base_epoch != self.owner.base_epoch or mark.epoch < self.arena.epoch:
            raise Corruption("a mark belongs to another epoch than the replica")
        if mark.partial and not self.arena.slot.moment:
            return  # there is no state that these copies could be of
        with self._held():
            with self._growing():
                if not self.complete:
                    self.arena.reserve_rows()
            self._note(mark)
        if not self.complete:
            self._take_place()

    def _note(self, mark: Mark) -> None:
        """Note a mark, in an order that leaves no false claim if the process dies meanwhile."""
        arena = self.arena
        try:
            if arena.epoch != mark.epoch:
                arena.begin_epoch(mark.epoch, again=True)
            if mark.line is not None and arena.line != mark.line:
                write_line(self._folder, mark.line)
            with self._growing():
                self._flip(mark)
            arena.reach(mark.head_step)
            arena.note_errors(mark.errors)
            arena.seal(mark.sealed)
            arena.keep(mark.kept)
            os.utime(self._folder)  # its age counts from now
        except OSError as error:
            raise folder_error(error, self._folder) from error

    def _flip(self, mark: Mark) -> None:
        """Make the slot with the newest copies current."""
        arena, here, spare = self.arena, self.arena.slot, self.arena.spare
        if not mark.moment:
            return
        if mark.moment == here.moment and not self._written.any() and self._extras is None:
            if not mark.partial:
                here.name(mark.whole)
            return
        spare.name("")
        arena.carry(np.flatnonzero(~self._written))
        if mark.partial:  # the extras are those of the state before
            if spare.moment != mark.moment:  # otherwise an earlier mark has carried them
                carry_extras(arena, mark.moment)
        elif self._extras:
            put_file(self._folder, spare.number, [self._extras])
        else:
            (self._folder / EXTRAS[spare.number]).unlink(missing_ok=True)
        arena.adopt_moment(mark.moment)
        arena.flip(spare, mark.moment, here.head if mark.partial else mark.head, mark.whole)
        self._extras, self._written = None, np.zeros(arena.layout.partitions, dtype=bool)

    def _take_place(self) -> None:
        """Move the complete replica to its place. An older replica there is deleted; an arena of this host is set
        aside.
        """
        lock = lock_folder(self._place, patience=1.0)
        old = self._place.with_name(self._place.name + ".old")
        try:
            require_newest(self._place, self._place.name, self.owner, self.arena.epoch)
            if os.path.lexists(self._place / FILE) and read_owner(self._place) is None:
                put_aside(self._place, self._folder)
            else:
                shutil.rmtree(old, ignore_errors=True)
                replace_folder(self._place, self._folder, old)
        except OSError as error:
            raise folder_error(error, self._place) from error
        finally:
            os.close(lock)
        self._folder, self.complete = self._place, True
        self.arena.moved_to(self._place)
        shutil.rmtree(old, ignore_errors=True)

    def remove(self) -> None:
        """Delete the replica, because the store has its whole state. Raises Fenced if it was taken."""
        with self._held():
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _growing(self) -> Iterator[None]:
        """Remove a new replica if there is no room for it inside. The folder is locked."""
        try:
            yield
        except Unavailable as error:
            if self.complete:
                raise
            shutil.rmtree(self._folder, ignore_errors=True)
            raise Unavailable(error.message, hint=error.hint, kind="arena-full") from error

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the folder's lock, and check that the arena is still this replica. Raises Fenced if it is not.

        Raises Contention while another process reads the arena, or is about to take it.
        """
        lock = lock_folder(self._folder)
        try:
            now = self._identity()
            if now is None:
                with contextlib.suppress(OSError):
                    os.rmdir(self._folder)  # the look created the folder
                raise _taken(self._folder)
            if now != self._checked:
                if now[0] != self._inode or read_owner(self._folder) != self.owner:
                    raise _taken(self._folder)
                self._checked = now
            yield
        finally:
            os.close(lock)

    def _identity(self) -> tuple[int, ...] | None:
        """Return the identity of the arena and of the owner's file in the folder; None if one is missing."""
        try:
            arena, owner = os.stat(self._folder / FILE), os.lstat(self._folder / OWNER)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return arena.st_ino, owner.st_ino, owner.st_mtime_ns


def require_newest(place: Path, run: str, owner: Owner, epoch: int) -> None:
    """Raise Fenced if the arena in `place` has a later epoch, or if a process of this host took it in this epoch."""
    try:
        present = Arena.share(place, run_id=run)
    except Corruption as error:
        log.warning("%s: it is replaced by a replica", error.message)
        return
    if present is None:
        return
    own = read_owner(place) is None
    blank = not present.intact().any()
    if own and owner.base_epoch <= present.epoch <= epoch and not blank:
        raise _taken(place)
    require_epoch(present, epoch)


def require_epoch(present: Arena, epoch: int) -> None:
    """Raise Fenced if this arena, which is on this host, is of a later epoch of the run."""
    if present.epoch > epoch:
        raise Fenced(
            f"{present.folder}: this host has seen epoch {present.epoch} of the run, and epoch {epoch} is over",
            hint="the run has continued elsewhere",
        )


def sweep(base: Path) -> None:
    """Delete incomplete replicas, and arenas, that killed processes have left."""
    sweep_incoming(base)
    for path in [*base.glob(f"*{SUCCESSOR}"), *base.glob("*.old")]:
        with contextlib.suppress(ScarError):
            _remove(path)


def _continued(folder: Path, run: str, layout: Layout) -> Arena | None:
    """Return the arena in `folder` if this replica can continue it."""
    try:
        arena = Arena.share(folder, run_id=run)
    except ScarError:
        return None
    return arena if arena is not None and arena.layout == layout else None


def _remove(folder: Path) -> None:
    lock = lock_folder(folder)
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _taken(folder: Path) -> Fenced:
    return Fenced(
        f"{folder}: a process of this host has taken the replica", hint="the run has continued elsewhere"
    )
