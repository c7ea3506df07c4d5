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
    """Commits hand-overs. Use one thread at a time.

    A hand-over is one commit. In a store with a log for each shard it is one for each, all at once.
    """

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
        self._members = writer.members
        self._shard_of = np.full(arena.layout.partitions, -1, dtype=np.int32)
        for shard, ids in self._members.items():
            self._shard_of[ids] = shard
        self._sealed: tuple[tuple[int, str], set[int]] = (-1, ""), set()
        """Number and identity of one hand-over, and the shards that it has sealed already."""
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
        if self._sealed[0] != named:
            self._sealed = named, set()
        already = self._sealed[1]
        rows = self._rows_of(handover)
        ids = self._waiting(handover) if rows is None else handover.ids
        shard_of = self._shard_of[ids]
        parts = [(shard, ids[shard_of == shard]) for shard in self._members if shard not in already]
        parts = [(shard, own) for shard, own in parts if own.size or handover.sealed]
        written = self._commit_all(parts, handover, already, rows)
        arena.read(handover.number)
        self.commit_extras(handover)
        if handover.sealed and len(already) == len(self._members):
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
        shard_of = self._shard_of[ids]
        parts = [(shard, ids[shard_of == shard]) for shard in np.unique(shard_of).tolist()]
        committed: dict[int, tuple[Ids, bool]] = {}
        self._commit_each(parts, part, committed)
        return sum(int(self._arena.layout.partition_bytes[own].sum()) for own, _ in committed.values())

    def commit_extras(self, handover: HandOver) -> bool:
        """See `scarctl.persist.evacuation.Tier`: commit the extras alone, unless a commit of copies has saved them."""
        named = handover.number, handover.version
        if handover.extras is None or named == self._extras_of:
            return True
        step, (shard, state) = step_of(handover.version), next(iter(self._writer.states.items()))
        if step < state.step:
            return state.extras is not None and state.extras[0] > handover.version
        none = np.empty(0, dtype=np.int64)
        self._writer.commit(shard, none, self._source, step=step, extras=handover.extras)
        self._extras_of = named
        return True

    def notes(self, whole: str) -> Notes:
        """See `scarctl.persist.evacuation.Tier`. The store is not read if this has sealed the state."""
        name, notes = self._notes
        if name == whole:
            return notes
        return stored_notes(self._writer.store, list(self._writer.states.values()), whole)

    def _encoded(self) -> NDArray[np.bool_]:
        """Return which partitions' newest copies in the store are encoded: bool (partitions,)."""
        found = np.zeros(self._arena.layout.partitions, dtype=bool)
        for state in self._writer.states.values():
            found[state.ids] = state.encoded
        return found

    def stored(self) -> Ids:
        """Return the version that the store has of every partition, -1 for none: int64 (partitions,)."""
        found = np.full(self._arena.layout.partitions, NEVER, dtype=np.int64)
        for state in self._writer.states.values():
            found[state.ids] = state.version
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

    def _commit_all(
        self, parts: list[tuple[int, Ids]], handover: HandOver, already: set[int], rows: Rows | None
    ) -> int:
        """Commit the ids of every shard of `parts`, all at once, and add newly sealed shards to `already`.

        Returns the bytes written.
        """
        sizes = stored_as(self._arena.layout, handover.encoding).partition_bytes
        committed: dict[int, tuple[Ids, bool]] = {}
        try:
            self._commit_each(parts, handover, committed, rows)
        finally:
            already.update(shard for shard, (_, sealed) in committed.items() if sealed)
        return sum(int(sizes[ids].sum()) for ids, _ in committed.values())

    def _commit_each(
        self,
        parts: list[tuple[int, Ids]],
        handover: HandOver,
        committed: dict[int, tuple[Ids, bool]],
        rows: Rows | None = None,
    ) -> None:
        """Commit the ids of every shard of `parts`, all at once, and add what `_commit` returns to `committed`.

        The first shard carries the extras. rows: the hand-over's own; None: those in the arena. The error of one shard
        is raised when all shards have ended.
        """
        sizes = stored_as(self._arena.layout, handover.encoding).partition_bytes
        carrier = parts[0][0] if parts else None  # extras belong to the whole process: one shard has them

        def commit(part: tuple[int, Ids]) -> BaseException | None:
            shard, ids = part
            try:
                extras = handover.extras if shard == carrier else None
                commit = self._commit if rows is None else partial(self._commit_staged, rows)
                committed[shard] = commit(shard, ids, handover, extras)
            except BaseException as error:  # raised once the other commits have ended
                return error
            return None

        with self.meter.commit(len(parts)):
            ended = list(
                self._writer.store.blobs.write_each(commit, parts, lambda part: int(sizes[part[1]].sum()))
            )
        if faults := [fault for fault in ended if fault is not None]:
            raise next((fault for fault in faults if not isinstance(fault, Exception)), faults[0])

    def _commit_staged(
        self, rows: Rows, shard: int, ids: Ids, handover: HandOver, extras: Any
    ) -> tuple[Ids, bool]:
        """Commit and acknowledge those of the `ids` that the store lacks, from the hand-over's rows.

        Returns these ids, and whether the shard is sealed.
        """
        arena, staged = self._arena, handover.staged
        assert staged is not None
        at = np.searchsorted(staged.ids, ids)
        versions, generation = staged.versions[at], staged.generation[at]
        stored, state = arena.lifted(versions), self._writer.states[shard]
        there = arena.lifted(state.version[state.find(ids)])
        # An evacuation may have saved newer copies meanwhile. Those that are acknowledged are durable since an earlier
        # attempt.
        newer = there > stored
        same = (arena.lifted(arena.durable[ids]) == stored) & (arena.encoding_error[ids] < 0)
        # Steps of an epoch never decrease: a commit at a later step neither seals nor has extras of an earlier one.
        step, floor = step_of(handover.version), self._writer.floor(shard)
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
            shard,
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

    def _commit(self, shard: int, ids: Ids, handover: HandOver, extras: Any) -> tuple[Ids, bool]:
        """Commit and acknowledge those of the `ids` without a newer copy in the arena.

        Returns these ids, and whether the shard is sealed.
        """
        arena = self._arena
        for _ in range(_ATTEMPTS):
            # Read first: if a copy changes after this, the comparison at the end discards the commit.
            before = arena.generation[ids].copy()
            versions = arena.version[ids]
            # A copy that is newer, or in progress, has its own hand-over.
            good = (versions >= 0) & (versions <= handover.version) & ((before & np.uint64(1)) == 0)
            ids, before, versions = ids[good], before[good], versions[good]
            sealed = handover.sealed and self._is_of(handover, shard, ids)
            if not ids.size and not sealed:
                return ids, False
            # Extras, seals and parts (number 0) are of the hand-over's step, other commits as old as their newest copy.
            own = sealed or extras is not None or not handover.number
            step, floor = step_of(handover.version if own else int(versions.max())), self._writer.floor(shard)
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
                    shard,
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
        raise Overwritten(
            f"shard {shard}: copies keep changing while they are written", hint="saving retries"
        )

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

    def _is_of(self, handover: HandOver, shard: int, ids: Ids) -> bool:
        """Return whether committing `ids` seals the shard: no copy is newer, and no other one pending."""
        arena, members, version = self._arena, self._members[shard], handover.version
        own = handover.ids[self._shard_of[handover.ids] == shard]
        if (arena.version[own] != version).any():
            return False  # a copy was torn, and an older one has taken its place
        if arena.whole != handover.whole:
            return False  # a partition was copied since, perhaps at the same step
        done = (arena.durable[members] == arena.version[members]) & ~self._encoded()[members]
        done[np.searchsorted(members, ids)] = True
        return bool((done & (arena.version[members] <= version) & arena.intact()[members]).all())
