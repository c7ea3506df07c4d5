"""Save copies: commit what is asked for from the arena to the store, then acknowledge it in the arena.

The arena says what the store lacks: copies whose moment differs from that of the store's. A request in its words says
what to save of it (`Arena.ask`). The persister holds a slot (`scarctl.arena.slots`), copies or writes the rows, and
looks at the hold after the last byte and before the record. If the hold has ended, it begins again with the current
slot.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.header import inode_in
from scarctl.arena.notes import stored_notes
from scarctl.arena.rows import Gathered
from scarctl.arena.slot import Slot
from scarctl.arena.slots import Hold, Look
from scarctl.errors import Fenced, Overwritten, ScarError
from scarctl.persist.speed import Meter
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

PRIVATE = 64 << 20
"""Bytes up to which everything is copied into a private buffer, as parts are: then the slot is free at once."""
_LEAST_HOLD, _MOST_HOLD = 5.0, 600.0
"""Shortest and longest time in seconds for which a slot is held while it is written to the store."""
_ATTEMPTS = 8
"""Attempts to write a segment while a flush, or the end of the time, keeps ending the hold. Each has twice the time."""
_LOOKS = 3
"""Attempts to copy what fits into a private buffer before the slot is held for it."""
_PAUSE = 0.01
_TIDY_PAUSE = 30.0  # seconds after a failure


class Interrupted(Exception):
    """A request was not served completely, because of a pause, or because another process needs the store."""


class Persister:
    """Commits copies. Use one thread at a time."""

    def __init__(self, arena: Arena, writer: StoreWriter) -> None:
        self.meter = Meter()
        """Measures the speed of commits."""
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
        Interrupted. Raises Fenced if another arena, fetched from another host, has taken the place.
        """
        self.require_place()
        arena, needed = self._arena, self._arena.slot.moment
        speed = self.meter.speed()
        rate = speed.bytes_per_second if speed is not None else 0.0
        attempt = 0
        while attempt < _ATTEMPTS:
            if self.interrupt.is_set():
                raise Interrupted
            whole, served = arena.wants_whole, arena.served
            nbytes = int(arena.layout.partition_bytes[arena.pending()].sum())
            if attempt < _LOOKS and (nbytes <= PRIVATE or not whole):
                look = arena.look()
                written = self._save_whole(look) if whole else self._save_part(look, served)
                if written is not None:
                    arena.serve(number)
                    return written
                attempt += 1
                continue
            seconds = max(_LEAST_HOLD, 2 * nbytes / rate if rate else 0.0) * 2**attempt
            with arena.held(min(seconds, _MOST_HOLD)) as hold:
                if hold.slot.moment >= needed:
                    written = self._save_whole(hold) if whole else self._save_part(hold, served)
                    if written is not None:
                        arena.serve(number)
                        return written
                    attempt += 1
                    continue
            time.sleep(_PAUSE)  # another reader holds an earlier state
        raise Overwritten("the state keeps changing while it is written", hint="saving retries")

    def require_place(self) -> None:
        """Raise Fenced if another arena has taken the place of the one that is saved."""
        if inode_in(self._arena.folder) != self._inode:
            raise Fenced(
                f"{self._arena.folder}: another arena has taken the place of the one that is saved",
                hint="the run has continued elsewhere",
            )

    def _save_whole(self, hold: Hold | Look) -> int | None:
        """Save all that is pending, with the extras. Return the bytes; None if the hold has ended."""
        arena, slot = self._arena, hold.slot
        if not slot.moment:
            return 0
        ids = np.flatnonzero((slot.differs(arena.saved) | self._encoded()) & slot.intact())
        if not ids.size and arena.kept == slot.moment:
            return 0
        return self.commit(hold, ids, seal=True)

    def _save_part(self, hold: Hold | Look, served: int) -> int | None:
        """Save what was chosen and is pending, with the extras. Return the bytes; None if the hold has ended."""
        arena, slot = self._arena, hold.slot
        wish = arena.wish.copy()
        wanted = (wish // 2 > served) & slot.intact()
        lossy = (wish % 2).astype(bool)
        # What the store has in fewer bits, it lacks, even if it never changes again.
        wanted &= slot.differs(arena.saved) | (~lossy & (arena.encoding_error >= 0))
        parts: list[tuple[Encoding, Ids]] = [
            (arena.encoding, np.flatnonzero(wanted & lossy)),
            ("exact", np.flatnonzero(wanted & ~lossy)),
        ]
        parts = [part for part in parts if part[1].size]
        found = [(Gathered(slot, ids), slot.moments[ids], slot.version[ids]) for _, ids in parts]
        head, moment = slot.head, slot.moment
        tree = self._extras(slot) if step_of(head) >= self._writer.floor else None
        if not hold.end():
            return None
        written = 0
        for (encoding, ids), (rows, moments, versions) in zip(parts, found, strict=True):
            written += self._put(ids, rows, moments, versions, head, encoding, tree)
            if tree is not None:
                self.extras_moment, tree = moment, None
        return written

    def commit(self, hold: Hold | Look, ids: Ids, *, seal: bool, extras: bool = True) -> int | None:
        """Commit the copies `ids` (ascending) of the slot that is held. Return the bytes; None if the hold has ended.

        seal: the store then has everything of that slot. extras: with its extras.
        """
        arena, slot = self._arena, hold.slot
        moment, head, whole = slot.moment, slot.head, slot.whole if seal else ""
        tree = self._extras(slot) if extras else None
        moments, versions = slot.moments[ids], slot.version[ids]
        rows: Source = slot.source
        if int(arena.layout.partition_bytes[ids].sum()) <= PRIVATE:
            rows = Gathered(slot, ids) if ids.size else slot.source
            if not hold.end():
                return None
            look = None
        else:
            look = hold.lasts
        step = step_of(head)
        if (
            step < self._writer.floor
        ):  # steps of an epoch never decrease: it neither seals nor has earlier extras
            whole, tree, seal = "", None, False
        try:
            written = self._put(ids, rows, moments, versions, head, "exact", tree, whole, look)
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
        look: Any = None,
    ) -> int:
        """Make one commit, and acknowledge its copies. Return their bytes in the store.

        whole: name of the whole state that it seals; "" if it seals none. look: see `StoreWriter.commit`.
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
        with self.meter.commit():
            self._writer.commit(
                ids,
                encoder or partial(self._uninterrupted, rows, look),
                step=step,
                steps=None if whole else step_of(versions),
                sealed=bool(whole),
                whole=whole,
                extras=tree,
                verify_source=look,
            )
        arena.encoding_error[ids] = -1.0 if encoder is None else encoder.errors
        arena.acknowledge(ids, versions, moments)
        return int(stored_as(arena.layout, encoding).partition_bytes[ids].sum())

    def _extras(self, slot: Slot) -> Any:
        found = read_extras(self._arena, slot.number)
        return None if found is None else found.tree

    def notes(self, whole: str) -> Notes:
        """See `scarctl.persist.evacuation.Tier`. The store is not read if this has sealed the state."""
        name, notes = self._notes
        if name == whole:
            return notes
        return stored_notes(self._writer.store, [self._writer.state], whole)

    def _encoded(self) -> NDArray[np.bool_]:
        """Return which partitions' newest copies in the store are encoded: bool (partitions,)."""
        found = np.zeros(self._arena.layout.partitions, dtype=bool)
        found[self._writer.state.ids] = self._writer.state.encoded
        return found

    def stored(self) -> Ids:
        """Return the version that the store has of every partition, -1 for none: int64 (partitions,)."""
        found = np.full(self._arena.layout.partitions, NEVER, dtype=np.int64)
        found[self._writer.state.ids] = self._writer.state.version
        return found

    def _uninterrupted(self, source: Source, look: Any, g: int, t: int, start: int, stop: int) -> Buffer:
        """Return rows of a source. Raises Interrupted if another thread wants that, Overwritten to stop early."""
        if self.interrupt.is_set():
            raise Interrupted
        if look is not None and not look():
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
