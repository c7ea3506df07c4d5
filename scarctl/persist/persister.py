"""Save copies: commit what is asked for from the arena to the store, then acknowledge it in the arena.

The arena says what the store lacks: copies whose moment differs from that of the store's. A request in its words says
what to save of it (`Arena.ask`). Parts, and small states, are copied into a private buffer, and the slot is looked at
after the last byte (`scarctl.arena.slots`). Of a larger state the slot is held while it is written, and the hold looked
at before the record. If it has ended, all that the store lacks is saved in pieces, as parts are. What changes
meanwhile is then the rest, of which the slot is held.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.header import inode_in
from scarctl.arena.notes import stored_notes
from scarctl.arena.rows import Gathered
from scarctl.arena.slot import Slot
from scarctl.arena.slots import LEAST_HOLD, MOST_HOLD, Reading
from scarctl.errors import Fenced, Overwritten, ScarError
from scarctl.policy.evacuation import Pace
from scarctl.policy.turns import PARTS, PRIVATE
from scarctl.state.encoding import stored_as
from scarctl.state.encodings import Encoding
from scarctl.state.extras import Notes
from scarctl.state.version import NEVER, step_of
from scarctl.store import Collector, StoreWriter
from scarctl.store.backends.base import Buffer
from scarctl.store.encoder import Encoder
from scarctl.store.segment import Source
from scarctl.util.arrays import Ids

if TYPE_CHECKING:
    from scarctl.persist.space import SpaceFields

log = logging.getLogger("scarctl")

_ATTEMPTS = 8
"""Attempts to save a state as a whole while a flush, or the end of the time, keeps ending the hold."""
_LOOKS = 3
"""Attempts to copy into a private buffer before the slot is held for it."""
_PAUSE = 0.01
_TIDY_PAUSE = 30.0  # seconds after a failure


_Wanted: TypeAlias = "Callable[[Slot], tuple[NDArray[np.bool_], NDArray[np.bool_] | None]]"
"""Returns which copies of a slot to save, and which of these may be encoded, None for none: bool (partitions,)."""


class Interrupted(Exception):
    """A request was not served completely, because of a pause, or because another process needs the store."""


class Persister:
    """Commits copies. Use one thread at a time."""

    def __init__(self, arena: Arena, writer: StoreWriter) -> None:
        self.pace = Pace()
        """The pace of commits so far."""
        self.interrupt = threading.Event()
        """Set by another thread to end the current write with `Interrupted`."""
        self._arena = arena
        self._inode = inode_in(arena.folder)
        self._writer = writer
        self._collector = Collector(writer)
        self._tidy_at = 0.0
        self._notes = "", Notes()
        """The newest seal, and the notes that were saved with it."""
        self.extras_moment = 0
        """See `scarctl.persist.evacuation.Tier`."""

    def persist(self, number: int) -> int:
        """Serve request `number`, and all earlier ones. Return the bytes of state written.

        After a failure call it again: durable copies are not written twice. Raises as `StoreWriter.commit` does, and
        Interrupted. Raises Fenced if another arena, fetched from another host, has taken the place; Overwritten if a
        whole state changes faster than it can be written: what was pending is then saved, of several moments.
        """
        self.require_place()
        written = self._save_whole() if self._arena.wants_whole else self._save_parts(self._chosen)
        self._arena.serve(number)
        return written

    def _save_whole(self) -> int:
        written, before = 0, math.inf
        for attempt in range(_ATTEMPTS):
            nbytes = int(self._arena.layout.partition_bytes[self._lacking(self._arena.slot)].sum())
            seconds = self.pace.seconds(nbytes)
            if (private := nbytes <= self._private) or seconds <= MOST_HOLD:
                held = LEAST_HOLD if private else min(MOST_HOLD, max(LEAST_HOLD, 2 * seconds) * 2**attempt)
                found = self._read(self._seal, held, looks=private)
                if found is not None:
                    return written + found
            elif nbytes >= before:
                break
            before = nbytes
            written += self._save_parts(lambda slot: (self._lacking(slot), None))
        raise Overwritten(
            "the state keeps changing while it is written",
            hint="the store has copies of several steps; saving it as a whole is retried",
        )

    def _read(self, save: Callable[[Reading], int | None], seconds: float, *, looks: bool) -> int | None:
        """Return what `save` does with a slot that is held, at most `seconds`. looks: without a hold first."""
        for _ in range(_LOOKS if looks else 0):
            self._require_time()
            if (found := save(self._arena.look())) is not None:
                return found
        needed, began = self._arena.slot.moment, time.monotonic()
        while True:
            self._require_time()
            with self._arena.held(seconds) as hold:
                enough = 2 * hold.seconds > seconds or time.monotonic() > began + LEAST_HOLD
                if hold.slot.moment >= needed and enough:
                    return save(hold)
            time.sleep(_PAUSE)  # another reader holds an earlier state, or not for as long

    @property
    def _private(self) -> int:
        """Bytes that are copied into a private buffer, but at least one partition: then the slot is free at once."""
        return max(PRIVATE, self._arena.layout.nbytes // PARTS)

    def require_place(self) -> None:
        """Raise Fenced if another arena has taken the place of the one that is saved."""
        if inode_in(self._arena.folder) != self._inode:
            raise Fenced(
                f"{self._arena.folder}: another arena has taken the place of the one that is saved",
                hint="the run has continued elsewhere",
            )

    def _require_time(self) -> None:
        if self.interrupt.is_set():
            raise Interrupted

    def _lacking(self, slot: Slot) -> NDArray[np.bool_]:
        """Return which copies of a slot the store lacks, or has in fewer bits: bool (partitions,)."""
        encoded = np.zeros(self._arena.layout.partitions, dtype=bool)
        encoded[self._writer.state.ids] = self._writer.state.encoded
        return (slot.differs(self._arena.saved) | encoded) & slot.intact()

    def _chosen(self, slot: Slot) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which copies of a slot requests for parts want, and which of these may be encoded."""
        arena, wish = self._arena, self._arena.wish.copy()
        lossy = (wish % 2).astype(bool)
        # What the store has in fewer bits, it lacks, even if it never changes again.
        lacking = slot.differs(arena.saved) | (~lossy & (arena.encoding_error >= 0))
        return (wish // 2 > arena.served) & slot.intact() & lacking, lossy

    def _seal(self, reading: Reading) -> int | None:
        """Save all that is pending, with the extras. Return the bytes; None if the slot was written meanwhile."""
        slot, ids = reading.slot, np.flatnonzero(self._lacking(reading.slot))
        if not slot.moment or (not ids.size and self._arena.kept == slot.moment):
            return 0
        return self.commit(reading, ids, seal=True)

    def _save_parts(self, wanted: _Wanted) -> int:
        """Save what is wanted in pieces, each of the newest state. Return the bytes.

        Raises Overwritten if that was written again and again while it was copied.
        """
        written, left = 0, np.ones(self._arena.layout.partitions, dtype=bool)
        while left.any():
            found = self._read(partial(self._save_piece, wanted, left), LEAST_HOLD, looks=True)
            if found is None:
                raise Overwritten("memory keeps changing while it is copied", hint="saving retries")
            written += found
        return written

    def _save_piece(self, wanted: _Wanted, left: NDArray[np.bool_], reading: Reading) -> int | None:
        """Save a piece of what is `left` and wanted, the most changed first, with the extras of its moment.

        Clears it in `left`, which is empty after the last one. Return the bytes; None if the slot was written.
        """
        arena, slot = self._arena, reading.slot
        encoding: Encoding = "exact"
        mine, lossy = wanted(slot)
        mine &= left
        ids = np.flatnonzero(mine)
        if not ids.size:
            left[:] = False
            return 0
        if lossy is not None and (mine & lossy).any():
            ids, encoding = np.flatnonzero(mine & lossy), arena.encoding
        sizes = arena.layout.partition_bytes[ids]
        if int(sizes.sum()) > self._private:
            from scarctl.policy.evacuation import fitting, order

            distance = arena.distance[ids].astype(np.float32)
            first = order(distance, sizes, arena.saved[ids] == 0)
            ids = np.sort(ids[first[fitting(sizes[first], self._private, math.inf)]])
        rows, moments, versions = Gathered(slot, ids), slot.moments[ids], slot.version[ids]
        head, moment = slot.head, slot.moment
        new = self.extras_moment != moment and step_of(head) >= self._writer.floor
        tree = self._extras(slot) if new else None
        if not reading.end():
            return None
        written = self._put(ids, rows, moments, versions, head, encoding, tree)
        left[ids] = False
        if tree is not None:
            self.extras_moment = moment
        return written

    def commit(self, hold: Reading, ids: Ids, *, seal: bool, extras: bool = True) -> int | None:
        """Commit the copies `ids` (ascending) of the slot that is held. Return the bytes; None if the hold has ended.

        seal: the store then has everything of that slot. extras: with its extras.
        """
        arena, slot = self._arena, hold.slot
        moment, head, whole = slot.moment, slot.head, slot.whole if seal else ""
        tree = self._extras(slot) if extras else None
        moments, versions = slot.moments[ids], slot.version[ids]
        rows: Source = slot.source
        if int(arena.layout.partition_bytes[ids].sum()) <= self._private:
            rows = Gathered(slot, ids) if ids.size else slot.source
            if not hold.end():
                return None
            lasts = None
        else:
            lasts = hold.lasts
        step = step_of(head)
        if (
            step < self._writer.floor
        ):  # steps of an epoch never decrease: it neither seals nor has earlier extras
            whole, tree, seal = "", None, False
        try:
            written = self._put(ids, rows, moments, versions, head, "exact", tree, whole, lasts)
        except Overwritten:
            return None
        if tree is not None:
            self.extras_moment = moment
        if seal:
            if whole:
                arena.seal(head)
                self._notes = whole, Notes.from_tree(tree)
            arena.keep(moment)
        return written

    def _put(
        self,
        ids: Ids,
        rows: Source,
        moments: Ids,
        versions: Ids,
        head: int,
        encoding: Encoding,
        tree: Any,
        whole: str = "",
        lasts: Callable[[], bool] | None = None,
    ) -> int:
        """Make one commit, and acknowledge its copies. Return their bytes in the store.

        whole: name of the whole state that it seals; "" if it seals none. lasts: `verify_source` of
            `StoreWriter.commit`.
        """
        arena, floor = self._arena, self._writer.floor
        if not ids.size and not whole and tree is None:
            return 0
        step = step_of(head)
        if step < floor:
            tree, step = None, floor
            if not ids.size:
                return 0
        encoder = None if encoding == "exact" else Encoder(arena.layout, encoding, rows, ids)
        began = time.monotonic()
        self._writer.commit(
            ids,
            encoder or partial(self._uninterrupted, rows, lasts),
            step=step,
            steps=None if whole else step_of(versions),
            sealed=bool(whole),
            whole=whole,
            extras=tree,
            verify_source=lasts,
        )
        arena.encoding_error[ids] = -1.0 if encoder is None else encoder.errors
        arena.acknowledge(ids, versions, moments)
        written = int(stored_as(arena.layout, encoding).partition_bytes[ids].sum())
        if written:
            self.pace.add(written, time.monotonic() - began)
        return written

    def _extras(self, slot: Slot) -> Any:
        found = read_extras(self._arena, slot.number)
        return None if found is None else found.tree

    def notes(self, whole: str) -> Notes:
        """See `scarctl.persist.evacuation.Tier`. The store is not read if this has sealed the state."""
        name, notes = self._notes
        if name == whole:
            return notes
        return stored_notes(self._writer.store, [self._writer.state], whole)

    def stored(self) -> Ids:
        """Return the version that the store has of every partition, -1 for none: int64 (partitions,)."""
        found = np.full(self._arena.layout.partitions, NEVER, dtype=np.int64)
        found[self._writer.state.ids] = self._writer.state.version
        return found

    def _uninterrupted(
        self, source: Source, lasts: Callable[[], bool] | None, g: int, t: int, start: int, stop: int
    ) -> Buffer:
        """Return rows of a source. Raises Interrupted if another thread wants that, Overwritten to stop early."""
        self._require_time()
        if lasts is not None and not lasts():
            raise Overwritten("the slot was needed for a newer state", hint="saving begins again")
        return source(g, t, start, stop)

    def tidy(self, limit: int) -> bool:
        """Collect old copies, moving about `limit` bytes. Return whether more may be left to do.

        Never raises, because saving does not depend on it. A failure is logged, and the work retried after a while.
        """
        if time.monotonic() < self._tidy_at:
            return False
        done = self._collector.done
        before = done.moved_bytes
        try:
            while not self.interrupt.is_set() and self._collector.turn():
                if done.moved_bytes - before >= limit:
                    return True
        except (ScarError, OSError, MemoryError) as error:
            log.warning("collecting old copies failed: %s", error)
            self._tidy_at = time.monotonic() + _TIDY_PAUSE
        return False

    @property
    def arena(self) -> Arena:
        """The arena whose copies are saved."""
        return self._arena

    def store_is_deleted(self) -> bool:
        """See `Store.is_deleted`."""
        return self._writer.store.is_deleted()

    @property
    def space(self) -> SpaceFields:
        """Bytes that saving and collecting have written, for display."""
        books, done = self._writer.ledger, self._collector.done
        return {
            "handed_bytes": books.handed_bytes,
            "written_bytes": books.written_bytes,
            "moved_bytes": done.moved_bytes,
            "collected_bytes": done.deleted_bytes,
            "write_amplification": round(books.written_bytes / books.handed_bytes, 4)
            if books.handed_bytes
            else None,
        }
