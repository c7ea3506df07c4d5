"""Open a store: its settings, its layouts, its lanes, and their states."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import LayoutMismatch, NoStore, ScarError, SettingsConflict, UsageError
from scarctl.state import codec
from scarctl.state.layout import Layout
from scarctl.store.backends.address import S3_SCHEMES, Address
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.connect import blobs_at
from scarctl.store.backends.probe import exclusive_here, probe
from scarctl.store.foreign import damaged_settings, no_store, refuse_foreign
from scarctl.store.format import (
    FORMAT,
    LANES,
    LOCK,
    MAX_SETTINGS,
    SETTINGS,
    Fields,
    corrupt,
    dump_json,
    load_json,
    lock_path,
    segment_path,
    shard_folder,
    shard_of_folder,
)
from scarctl.store.layouts import read_layout
from scarctl.store.lock import BothLocks, NoLock, StoreLock, for_a_writer
from scarctl.store.log import ShardLog
from scarctl.store.read import Batch, Room, read_unit, units
from scarctl.store.record import Record
from scarctl.store.segment import ascending
from scarctl.store.segment_reader import open_segment
from scarctl.store.settings import Settings
from scarctl.store.shard_state import ShardState
from scarctl.store.term import now, number_of, who
from scarctl.util.arrays import Ids

_RACES = 4

Lock: TypeAlias = StoreLock | BothLocks | NoLock


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's or member's lane of a store."""

    shard: int
    current: bool = False  # its writer begins only while the newest topology has the shard


class Found(NamedTuple):
    """The line of a lane, for memory that notes it: see `scarctl.store.term.Line`. The id is a number."""

    id: int
    k: int
    claimed: frozenset[int] = frozenset()
    """Of a lane without a record: the ids of its terms."""


class Store:
    """An open store. Reading takes no lock and may continue while a writer commits."""

    def __init__(self, address: Address, blobs: Blobs, identity: str, settings: Settings) -> None:
        self.address = address
        self.url = address.shown
        """The given address, for display, without secrets."""
        self.where = str(address.root) if address.root is not None else address.shown
        """The absolute address, for display."""
        self.id = identity
        self.settings = settings
        self.blobs = blobs
        self._layouts: dict[str, Layout] = {}
        self.part: Part | None = None
        """The lane of this view; None for a store with all lanes: see `of_shard`."""
        self._lock: Lock | None = None
        self._taken: Lock | None = None
        """The lock that was taken last. A writer may have it."""
        self._locked = self._closed = False

    @property
    def root(self) -> Path:
        """The folder of a local store. Raises UsageError for a remote one."""
        if self.address.root is None:
            raise UsageError(f"{self.where}: this is not a local folder")
        return self.address.root

    @classmethod
    def create(
        cls,
        url: str | os.PathLike[str],
        *,
        shards: int | None = None,
        seed: int | None = None,
        partition_bytes: int | None = None,
        by_layer: bool | None = None,
        rows: Mapping[str, int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        assume_single_writer: bool = False,
    ) -> Store:
        """Create a store, or open an existing one, if its settings equal the given ones (not None).

        storage_options: options of a remote store's file system, see `scarctl.store.backends.address`.
        assume_single_writer: create it even if the place cannot create files exclusively.

        Raises SettingsConflict if a setting differs; NoStore (kind "foreign-store") if the folder holds other files;
        MissingGuarantee if the place cannot create files exclusively.
        """
        given: dict[str, Any] = {"shards": shards, "seed": seed, "partition_bytes": partition_bytes}
        given |= {"by_layer": by_layer, "rows": None if rows is None else tuple(rows.items())}
        given = {name: value for name, value in given.items() if value is not None}
        settings = Settings(**given)
        address = Address.parse(url, storage_options)
        blobs = blobs_at(address)
        if not blobs.has(SETTINGS):
            refuse_foreign(address, blobs, "nothing was created")
            blobs.begin()
            # Only concurrent creations reveal a server that checks first and then writes.
            rounds = 0 if address.scheme in S3_SCHEMES else _RACES
            found = None if address.root is not None else probe(blobs, assume_single_writer, rounds=rounds)
            blobs.exclusive = found is None or exclusive_here(blobs, found, address.shown)
            obj = {
                "format": FORMAT,
                "kind": "store",
                "id": uuid.uuid4().hex,
                "settings": asdict(settings),
                "probe": found,
                "created": now(),
                "writer": who(),
            }
            # If another process has just created the store, its settings are compared below.
            with contextlib.suppress(FileExistsError):
                blobs.create_exclusive(SETTINGS, [dump_json(obj)])
        store = cls._open(address, blobs, strict=not assume_single_writer)
        for name, value in given.items():
            if value != getattr(store.settings, name):
                raise SettingsConflict(
                    f"{store.where}: {name} is {getattr(store.settings, name)} in this store, not {value}",
                    hint="omit the setting, or create another store in another folder",
                )
        return store

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Store:
        """Open an existing store. Raises NoStore, Corruption, AccessDenied, Unavailable."""
        address = Address.parse(url, storage_options)
        return cls._open(address, blobs_at(address))

    @classmethod
    def _open(cls, address: Address, blobs: Blobs, *, strict: bool = False) -> Store:
        what = blobs.where(SETTINGS)
        if not blobs.has(SETTINGS):
            refuse_foreign(address, blobs, "use the folder of a store")
            if not blobs.has(SETTINGS):  # another process may just have created it
                raise NoStore(
                    f"{address.root or address.shown}: there is no store here", hint=no_store(address)
                )
        with damaged_settings(address, blobs):
            obj = load_json(blobs.read(SETTINGS, MAX_SETTINGS), what)
            f = Fields(obj, what)
            if f.text("kind") != "store":
                raise corrupt(what, "it is not a store's file")
            run, settings = f.hex("id", 32), Settings.from_json(f.raw("settings"), what)
        if address.root is None:
            blobs.exclusive = exclusive_here(blobs, obj.get("probe"), what, strict=strict)
        return cls(address, blobs, run, settings)

    def again(self) -> Store:
        """Return the same store, opened again, without cached files."""
        return Store._open(self.address, self.blobs)

    def is_replaced(self) -> bool:
        """Return whether another store has been made in this one's place. Raises as `open` does."""
        return self.again().id != self.id

    def is_deleted(self) -> bool:
        """Return whether this store was deleted for certain, so that it never comes back except from a copy of it.

        Its lock, which this process holds, has no name any more, and its place holds no store, or another one. A store
        that was moved, or whose file system was unmounted, keeps the lock's name. So a remote store, without a lock,
        is never deleted for certain; nor is one on a network file system that keeps the names of open files.
        """
        if self._taken is None or not self._taken.deleted:
            return False
        try:
            return self.is_replaced()
        except NoStore:
            return True
        except ScarError:
            return False

    def of_shard(self, shard: int, *, current: bool = False) -> Store:
        """Return the view of the store for the rank that saves to lane `shard`, without other lanes: see `Part`.

        Close the view instead of the store that it was made of.
        """
        twin = Store(self.address, self.blobs, self.id, self.settings)
        twin.part = Part(shard, current)
        twin._layouts = self._layouts  # a digest names the same layout in both
        return twin

    @property
    def lane(self) -> int:
        """The lane to which a process with this view saves: 0 if it saves alone."""
        return 0 if self.part is None else self.part.shard

    @property
    def run_id(self) -> str:
        """Id of the store at this place, or of the shard in it. It also names the arena's folder."""
        run = f"{self.id}.{self.address.digest}"
        return run if self.part is None else f"{run}-{self.part.shard}"

    def shard_of(self, layout: Layout) -> NDArray[np.int32]:
        """Return the shard of every partition: int32 of shape (layout.partitions,)."""
        if self.part is not None:
            return np.full(layout.partitions, self.part.shard, dtype=np.int32)
        return layout.shards(self.settings.shards, self.settings.seed)

    def close(self) -> None:
        """Release the lock, and the address's connections."""
        self._closed = True
        self.unlock()
        self.blobs.close()

    def lock(self) -> None:
        """Take the store's lock before a layout is known; `unlock` releases it. Raises Contention.

        A remote store has no lock: there the epoch shows an older writer that a newer one exists.
        """
        self._lock = for_a_writer(self.take_lock)
        self._locked = True

    def unlock(self) -> None:
        """Release the lock, if this store holds it. A writer that is still open keeps it until it is closed."""
        lock, self._lock, self._locked = self._lock, None, False
        if lock is not None:
            lock.release()

    def take_lock(self) -> Lock:
        """Take the lock, from this store if it holds one. Give it back with `return_lock`. Raises Contention."""
        lock, self._lock = self._lock, None
        if lock is None or not lock.held:
            lock = self._new_lock()
        self._taken = lock
        return lock

    def _new_lock(self) -> Lock:
        if self.address.root is None:
            return NoLock()
        if self.part is None:
            return StoreLock(self.root / LOCK)
        self.blobs.prepare(shard_folder(self.part.shard))
        return BothLocks(self.address.root / LOCK, self.address.root / lock_path(self.part.shard))

    def return_lock(self, lock: Lock) -> None:
        """Keep a lock that came from `lock`, release any other."""
        if self._locked and not self._closed:
            self._lock = lock
        else:
            lock.release()

    # layouts

    def layout(self, digest: str) -> Layout:
        """Return the layout of this digest. Raises Corruption if it is missing or damaged."""
        if digest not in self._layouts:
            self._layouts[digest] = read_layout(self.blobs, digest)
        return self._layouts[digest]

    def current_layout(self, *, around: bool = False) -> Layout | None:
        """Return the layout of the newest records; None before the first. around: see `state`. Raises Corruption."""
        logs = [self.log(shard) for shard in self.shards()]
        found = self.blobs.each(lambda log: log.newest(around=around), logs)
        record = max((one for one in found if one is not None), key=lambda one: one.epoch, default=None)
        return None if record is None else self.layout(record.layout)

    # logs

    def shards(self) -> list[int]:
        """Return the lanes that have a term."""
        if self.part is not None:
            return [self.part.shard] if self.log(self.part.shard).terms() else []
        found = (shard_of_folder(name) for name in self.blobs.folders(LANES))
        return sorted(shard for shard in found if shard is not None)

    def line(self) -> Found | None:
        """Return the line of this view's lane; None if nobody has claimed a term there. Raises Corruption."""
        log = self.log(self.lane)
        return self.line_of(log.newest()) if log.terms() else None

    def line_of(self, newest: Record | None) -> Found:
        """Return the line of this view's lane from its newest record; None: it has none."""
        if newest is not None:
            return Found(number_of(newest.line.id), newest.line.k)
        log = self.log(self.lane)
        return Found(0, 0, frozenset(number_of(log.term(number).id) for number in log.terms()))

    def log(self, shard: int) -> ShardLog:
        return ShardLog(self.blobs, shard, self.layout)

    def state(
        self, shard: int, layout: Layout | None = None, at: int | None = None, *, around: bool = False
    ) -> ShardState:
        """Return the state of a shard after record `at` (default: the newest). An empty log gives an empty state.

        around: read around damaged records, as far as the others permit. All members are in doubt that no record after
        a damaged one holds, so nothing of them is exact. Only for readers: a writer needs every record.

        Raises Corruption, naming the file; LayoutMismatch if `layout` is not None and differs from the state's.
        """
        state = self.log(shard).state(at, around=around)
        if layout is not None and state.layout is not None and state.layout.digest != layout.digest:
            raise self.mismatch(state.layout, layout)
        return state

    def states(
        self, shards: Iterable[int], at: Mapping[int, int] | None = None, *, around: bool = False
    ) -> dict[int, ShardState]:
        """Return the states of several shards, by shard: see `state`."""
        shards, seqs = list(shards), at or {}
        found = self.blobs.each(lambda s: self.state(s, at=seqs.get(s), around=around), shards)
        return dict(zip(shards, found, strict=True))

    def mismatch(self, stored: Layout, given: Layout) -> LayoutMismatch:
        """Return the error for a layout that differs from the store's, with the differences."""
        lines = stored.differences(given)
        listed = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
        return LayoutMismatch(
            f"{self.where}: the state does not fit this store: {listed}",
            hint="use the model and optimizer of the store, or another folder",
        )

    # data

    def read(
        self,
        state: ShardState,
        ids: Ids,
        *,
        corrupt: list[tuple[Ids, str]],
        room: Room | None = None,
        as_stored: bool = False,
    ) -> Iterator[Batch]:
        """Read and verify the copies of `ids` that `state` names, about `Blobs.batch` bytes at a time.

        corrupt: gets (ids, reason) for partitions whose copy is missing or damaged, or that were never saved.
        room: memory to read into. Its contents are not verified before they are yielded.
        as_stored: do not decode encoded copies.

        Yields the others by segment, group and id. Raises Unavailable, AccessDenied.
        """
        if state.layout is None:
            if len(ids):
                corrupt.append((np.asarray(ids), f"{self.where}: log {state.shard} has no record"))
            return
        ids = ascending(ids)
        at = state.find(ids)
        saved = (at >= 0) & (state.segment[at] >= 0) if len(state.ids) else np.zeros(len(ids), bool)
        if not saved.all():
            corrupt.append((ids[~saved], "never saved"))
        gone: list[tuple[Ids, str]] = []
        # A remote read that is no longer wanted ends by its own deadline. By then it must not write anywhere.
        room = room if self.address.root is not None else None
        read = partial(read_unit, self.blobs, state, state.layout, room=room, as_stored=as_stored)
        parts = units(state, state.layout, at[saved], self.blobs.batch)
        for found in self.blobs.each(read, parts, attrgetter("nbytes")):
            yield from found.batches
            corrupt += found.corrupt
            gone += found.gone
        if gone:
            again = self._moved(state, gone, corrupt)
            yield from self.read(state, again, corrupt=corrupt, room=room, as_stored=as_stored)

    def _moved(self, state: ShardState, gone: list[tuple[Ids, str]], corrupt: list[tuple[Ids, str]]) -> Ids:
        """Update `state` where a segment is missing, and return the copies that the writer has moved.

        A state of the past takes no newer copies.
        """
        fresh = self.state(state.shard)
        moved = []
        for ids, reason in gone:
            taken = state.take_over(fresh, ids)
            if not taken.all():
                corrupt.append((ids[~taken], reason))
            moved.append(ids[taken])
        return np.concatenate(moved)

    def read_extras(self, state: ShardState) -> tuple[int, object] | None:
        """Return the newest extras, verified, as (version, object); None if no extras were saved. Raises Corruption."""
        if state.extras is None:
            return None
        version, number = state.extras
        path = segment_path(state.shard, state.segments[number].name)
        what = self.blobs.where(path)
        try:
            with open_segment(self.blobs, path, state.segments[number]) as segment:
                text, tensors = segment.extras()
            return version, codec.decode(text, tensors)
        except FileNotFoundError:
            fresh = None if state.past else self.state(state.shard)
            if fresh is not None and fresh.extras is not None and fresh.extras[0] > version:
                return self.read_extras(fresh)  # the writer has newer ones, and has collected these
            raise corrupt(what, "the segment is missing") from None
