"""Save hand-overs: commit copies from the arena to the store, then acknowledge them in the arena."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.header import inode_in
from scarctl.arena.notes import stored_notes
from scarctl.arena.queue import HandOver
from scarctl.arena.staged import Rows
from scarctl.errors import Corruption, Fenced, Overwritten, ScarError
from scarctl.persist.speed import Meter
from scarctl.state.encoding import stored_as
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
"""Attempts to write a segment while newer copies keep replacing its rows."""
_TIDY_PAUSE = 30.0  # seconds after a failure


class Interrupted(Exception):
    """A hand-over was not written completely, because of a pause, or because another process needs the store."""


class Persister:
    """Commits hand-overs, one commit for each. Use one thread at a time."""

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
        self._sealed = -1, ""
        """Number and identity of the hand-over that was sealed last."""
        self._extras_of = -1, NEVER
        """Number and version of the hand-over whose extras were saved last."""
        self._checked: tuple[HandOver, Rows | None] | None = None
        """The hand-over that was checked last, and its rows."""
        self._notes = "", Notes()
        """The newest seal, and the notes that were saved with it."""

    def check(self, handover: HandOver) -> None:
        """Raise Corruption if the hand-over names partitions that the layout does not have, or has other rows.

        Raises FileNotFoundError if its rows are gone. Those that are there are kept for `persist`.
        Raises Fenced if another arena, fetched from another host, has taken the place: the hand-over is of its copies.
        """
        if inode_in(self._arena.folder) != self._inode:
            raise Fenced(
                f"{self._arena.folder}: another arena has taken the place of the one that is saved",
                hint="the run has continued elsewhere",
            )
        if handover.ids.size and handover.ids[-1] >= self._arena.layout.partitions:
            raise Corruption(f"hand-over {handover.number} names partitions that do not exist")
        self._checked = handover, self._rows_of(handover)

    def _rows_of(self, handover: HandOver) -> Rows | None:
        """Return the hand-over's own rows; None if they are those in the arena."""
        checked, self._checked = self._checked, None
        if checked is not None and checked[0] is handover:
            return checked[1]
        staged = handover.staged
        return None if staged is None else Rows(staged.path, self._arena.layout, handover.ids)

    def persist(self, handover: HandOver) -> int:
        """Commit a hand-over and acknowledge it in the arena. Return the bytes of state written.

        A hand-over with rows of its own saves these. Otherwise its rows are the arena's: pending copies that are older
        are committed with them, and partitions that have a newer copy are left out. After a failure call it again:
        durable copies are not written twice. Raises as `StoreWriter.commit` does, and Interrupted.
        """
        arena, version = self._arena, handover.version
        named = handover.number, handover.whole  # another process's queue may use the number again
        rows = self._rows_of(handover)
        ids = self._waiting(handover) if rows is None else handover.ids
        written = 0
        if self._sealed != named and (ids.size or handover.sealed):
            written, sealed = self._commit(ids, handover, rows)
            self._sealed = named if sealed else self._sealed
        arena.read(handover.number)
        self.commit_extras(handover)
        if handover.sealed and self._sealed == named:
            arena.seal(version)
            if handover.extras is not None:
                self._notes = handover.whole, Notes.from_tree(handover.extras)
        return written

    def _waiting(self, handover: HandOver) -> Ids:
        """Return the partitions whose copies in the arena a hand-over without rows of its own saves, ascending."""
        arena, version = self._arena, handover.version
        waiting = arena.pending() & arena.intact() & (arena.version < version)
        own = handover.ids[arena.version[handover.ids] == version]
        waiting[own[arena.durable[own] != version]] = True
        if handover.sealed:
            waiting |= self._encoded() & arena.intact()
        return np.flatnonzero(waiting)

    def covers(self, handover: HandOver) -> bool:
        """Return whether all of the state up to a durable hand-over is durable: its extras, and every copy."""
        arena = self._arena
        left = arena.pending() & arena.intact() & (arena.version <= handover.version)
        return handover.extras is not None and not left.any()

    def commit_part(self, handover: HandOver, ids: Ids, extras: Any) -> int:
        """See `scarctl.persist.evacuation.Tier`: commit copies, none newer than the hand-over; seal nothing."""
        part = replace(handover, ids=ids, whole="", extras=extras, unsaved=None)
        return self._commit(ids, part, None)[0]

    def commit_extras(self, handover: HandOver) -> bool:
        """See `scarctl.persist.evacuation.Tier`: commit the extras alone, unless a commit of copies has saved them."""
        named = handover.number, handover.version
        if handover.extras is None or named == self._extras_of:
            return True
        step, state = step_of(handover.version), self._writer.state
        if step < state.step:
            return state.extras is not None and state.extras[0] > handover.version
        none = np.empty(0, dtype=np.int64)
        self._writer.commit(none, self._source, step=step, extras=handover.extras)
        self._extras_of = named
        return True

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

    def _commit(self, ids: Ids, handover: HandOver, rows: Rows | None) -> tuple[int, bool]:
        """Commit and acknowledge the `ids`. Return the bytes written, and whether the state is sealed.

        rows: the hand-over's own; None: those in the arena.
        """
        sizes = stored_as(self._arena.layout, handover.encoding).partition_bytes
        with self.meter.commit():
            commit = self._commit_arena if rows is None else partial(self._commit_staged, rows)
            ids, sealed = commit(ids, handover)
        return int(sizes[ids].sum()), sealed

    def _commit_staged(self, rows: Rows, ids: Ids, handover: HandOver) -> tuple[Ids, bool]:
        """Commit and acknowledge those of the `ids` that the store lacks, from the hand-over's rows.

        Returns these ids, and whether the state is sealed.
        """
        arena, staged, extras = self._arena, handover.staged, handover.extras
        assert staged is not None
        at = np.searchsorted(staged.ids, ids)
        versions, generation = staged.versions[at], staged.generation[at]
        stored, state = arena.lifted(versions), self._writer.state
        there = arena.lifted(state.version[state.find(ids)])
        # An evacuation may have saved newer copies meanwhile. Those that are acknowledged are durable since an earlier
        # attempt.
        newer = there > stored
        same = (arena.lifted(arena.durable[ids]) == stored) & (arena.encoding_error[ids] < 0)
        # Steps of an epoch never decrease: a commit at a later step neither seals nor has extras of an earlier one.
        step, floor = step_of(handover.version), self._writer.floor
        sealed = handover.sealed and step >= floor and not newer.any()
        extras = extras if step >= floor else None
        lacking = ~(newer | same)
        ids, versions, generation = ids[lacking], versions[lacking], generation[lacking]
        if not (ids.size or sealed):
            return ids, False
        encoder = (
            None if handover.encoding == "exact" else Encoder(arena.layout, handover.encoding, rows, ids)
        )
        self._writer.commit(
            ids,
            encoder or partial(self._uninterrupted, rows),
            step=max(step, floor),
            steps=step_of(versions),
            sealed=sealed,
            whole=handover.whole if sealed else "",
            extras=extras,
        )
        if extras is not None:
            self._extras_of = handover.number, handover.version
        arena.encoding_error[ids] = -1.0 if encoder is None else encoder.errors
        arena.acknowledge(ids, versions, generation)
        return ids, sealed

    def _uninterrupted(self, source: Source, g: int, t: int, start: int, stop: int) -> Buffer:
        """Return rows of a source. Raises Interrupted if another thread has asked for it."""
        if self.interrupt.is_set():
            raise Interrupted
        return source(g, t, start, stop)

    def _commit_arena(self, ids: Ids, handover: HandOver) -> tuple[Ids, bool]:
        """Commit and acknowledge those of the `ids` without a newer copy in the arena.

        Returns these ids, and whether the state is sealed.
        """
        arena, extras = self._arena, handover.extras
        for _ in range(_ATTEMPTS):
            # Read first: if a copy changes after this, the comparison at the end discards the commit.
            before = arena.generation[ids].copy()
            versions = arena.version[ids]
            # A copy that is newer, or in progress, has its own hand-over.
            good = (versions >= 0) & (versions <= handover.version) & ((before & np.uint64(1)) == 0)
            ids, before, versions = ids[good], before[good], versions[good]
            sealed = handover.sealed and self._is_of(handover, ids)
            if not ids.size and not sealed:
                return ids, False
            # Extras, seals and parts (number 0) are of the hand-over's step, other commits as old as their newest copy.
            own = sealed or extras is not None or not handover.number
            step, floor = step_of(handover.version if own else int(versions.max())), self._writer.floor
            if step < floor:  # as in `_commit_staged`
                sealed, extras = False, None
                if not ids.size:
                    return ids, False
            rows = partial(self._source_of, ids, before)
            source: Source | Encoder = rows
            if handover.encoding != "exact":
                source = Encoder(arena.layout, handover.encoding, rows, ids)
            try:
                self._writer.commit(
                    ids,
                    source,
                    step=max(step, floor),
                    steps=step_of(versions),
                    sealed=sealed,
                    whole=handover.whole if sealed else "",
                    extras=extras,
                    verify_source=partial(self._unchanged, ids, before),
                )
            except Overwritten:
                continue
            if extras is not None:
                self._extras_of = handover.number, handover.version
            arena.encoding_error[ids] = source.errors if isinstance(source, Encoder) else -1.0
            arena.acknowledge(ids, versions, before)
            return ids, sealed
        raise Overwritten("copies keep changing while they are written", hint="saving retries")

    def _source(self, g: int, t: int, start: int, stop: int) -> Buffer:
        return self._uninterrupted(self._arena.source, g, t, start, stop)

    def _source_of(
        self, ids: Ids, before: NDArray[np.uint64], g: int, t: int, start: int, stop: int
    ) -> Buffer:
        """Return rows of the arena. Raises Overwritten if a copy in them has changed, to stop writing early."""
        base, rows = int(self._arena.layout.base[g]), self._arena.layout.groups[g].rows_per_partition
        first, last = np.searchsorted(ids, (base + start // rows, base + -(-stop // rows)))
        if (self._arena.generation[ids[first:last]] != before[first:last]).any():
            raise Overwritten("copies have changed while they were written", hint="saving retries")
        return self._source(g, t, start, stop)

    def _unchanged(self, ids: Ids, before: NDArray[np.uint64]) -> bool:
        return bool((self._arena.generation[ids] == before).all())

    def _is_of(self, handover: HandOver, ids: Ids) -> bool:
        """Return whether committing `ids` seals the state: no copy is newer, and no other one pending."""
        arena, version = self._arena, handover.version
        if (arena.version[handover.ids] != version).any():
            return False  # a copy was torn, and an older one has taken its place
        if arena.whole != handover.whole:
            return False  # a partition was copied since, perhaps at the same step
        done = (arena.durable == arena.version) & ~self._encoded()
        done[ids] = True
        return bool((done & (arena.version <= version) & arena.intact()).all())
