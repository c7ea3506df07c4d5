"""Open a lane of a store for writing, and commit to it (docs/FORMAT.md, sections 6 and 8)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, Fenced, Unavailable, UsageError
from scarctl.state.encodings import Encoding
from scarctl.state.layout import Layout
from scarctl.state.version import MAX_STEP, pack
from scarctl.store.claim import Claim, claim, prepare
from scarctl.store.compact import Ledger
from scarctl.store.encoder import Encoder
from scarctl.store.layouts import write_layout
from scarctl.store.lock import for_a_writer
from scarctl.store.publish import Publisher
from scarctl.store.record import DELTA, FULL, Record
from scarctl.store.segment import Pieces, Source, ascending
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import is_kept
from scarctl.store.store import Found, Store
from scarctl.store.table import FULL_LEAST, FULL_RECORDS, Tail
from scarctl.store.term import NO_LINE, Line, Term
from scarctl.store.topology import refuse_ranks, require_current
from scarctl.util.arrays import Ids


class Companion(Protocol):
    """Notes what a writer has saved. An arena does so, to prove that it belongs to the store."""

    def begin_line(self, own: Line, base: Line) -> None:
        """Note the writer's term and its newest changing record there, and the line on which the term began.

        Raises Unavailable if that cannot be noted.
        """

    def note(self, own: Line) -> None:
        """Note that a record that changes the state is acknowledged."""


def open_writer(store: Store, *, layout: Layout, empty: bool = False) -> StoreWriter:
    """Open a lane of a store for writing: claim a term, which fences all older writers.

    empty: from now on the lane has no partitions, and only its extras count.

    Raises Contention if another live process writes; LayoutMismatch if the lane holds another layout; UsageError
    (also for a whole store of several ranks), Corruption, AccessDenied, Unavailable; Fenced if a newer writer has come,
    or as `require_current` does.
    """
    return StoreWriter(store, layout, empty=empty)


class StoreWriter:
    """The one writer of a lane, see `open_writer`.

    Every commit updates the state, whose arrays are read-only for callers. Use a writer in one thread at a time. A
    forked child cannot use it.
    """

    epoch: int
    """See `Record.epoch`."""
    line: Found
    """What the opening has found: see `Store.line`."""

    def __init__(self, store: Store, layout: Layout, *, empty: bool = False) -> None:
        self.store = store
        self.layout = layout
        self.shard = store.lane
        nobody = np.empty(0, np.int64)
        self._ids = nobody if empty else np.arange(layout.partitions, dtype=np.int64)
        self._pid = os.getpid()
        self._claimed: set[str] = set()  # ids of all its terms
        self._renewing = False  # the term is over, because its writer is about to begin another one
        self._floor = 0  # the step of the newest commit in this epoch
        self._closed = False
        self._companion: Companion | None = None
        self.epoch = 0
        self._publisher = Publisher(store, layout)
        self._lock = for_a_writer(store.take_lock)
        try:
            refuse_ranks(store)
            current = store.current_layout()
            if current is not None and current != layout:
                raise store.mismatch(current, layout)
            write_layout(store.blobs, layout)
            prepare(store, self.shard)
            found = claim(store, self.shard, self._claimed)
            self.line = store.line_of(found.base)
            self._begin(found, found.state, epoch=found.term.number)
            require_current(store)
        except BaseException:
            store.return_lock(self._lock)
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. The second call does nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed, self._companion = True, None
        self.store.return_lock(self._lock)

    @property
    def term(self) -> Term:
        """The term of the newest opening."""
        return self._publisher.term

    @property
    def state(self) -> ShardState:
        """State of the lane."""
        return self._publisher.state

    @property
    def ledger(self) -> Ledger:
        """Counts of written bytes, for collectors and for display."""
        return self._publisher.ledger

    # --- commits --------------------------------------------------------------------------------------------

    def commit(
        self,
        ids: Ids,
        source: Source | Encoder,
        *,
        step: int,
        steps: Ids | None = None,
        sealed: bool = False,
        whole: str = "",
        extras: object | None = None,
        verify_source: Callable[[], bool] | None = None,
    ) -> Record:
        """Save the partitions `ids` (int64, any order) as of `step`; durable on return.

        source: an Encoder stores encoded copies, which seal nothing.
        steps: the step of each copy, for ids in ascending order; at most `step`. None: all are of `step`.
        sealed: with this record every partition's newest copy is of this step: others than `ids` have not changed since
            they were saved. `ids` may then be empty.
        whole: name of the commit of the whole state that a sealed record belongs to; see `Record.whole`. "": the record
            gives it a name.
        extras: saved whole with the commit (see `scarctl.state.codec`); None: no extras.
        verify_source: called after the data are written; False discards the segment and raises Overwritten.

        Raises UsageError (nothing written), Fenced (by a newer writer, permanently), Overwritten. Raises Unavailable or
        AccessDenied if the commit did not happen, except kind "in-doubt": the next commit settles that first. After an
        error the store is readable at its last acknowledged commit. Except after Fenced, committing again is possible.
        """
        state = self._ready()
        ids = _checked_ids(state, ids, step, self._floor, sealed=sealed, extras=extras)
        if sealed and isinstance(source, Encoder):
            raise UsageError("a sealed commit cannot have encoded copies", hint="commit exact ones")
        if whole and not sealed:
            raise UsageError("only a sealed commit has a name of the whole state")
        versions = None if steps is None else _checked_versions(state, ids, self.epoch, step, steps)
        versions = None if sealed else versions
        kind = FULL if sealed or self._is_due(state, len(ids)) else DELTA
        record = self._next(kind, step, mixed=versions is not None, extras=extras is not None)
        own = Line(record.place.id, record.k)
        if sealed:
            record = replace(record, whole=whole or record.place.identity, seal=record.place)
        record = replace(record, line=own, partitions=len(ids))
        record, tail = self._publisher.segment(
            record, ids, source, extras=extras, verify_source=verify_source, versions=versions
        )
        self._publish(record, tail)
        self.ledger.handed_bytes += record.nbytes
        self._floor = step
        return record

    @property
    def floor(self) -> int:
        """The step of the newest commit in this epoch, the least for the next one; 0 without one."""
        return self._floor

    def roll_back(self, seq: int) -> None:
        """Begin a term, and an epoch, with the state after record `seq`. Later records are never seen again.

        Raises UsageError for a record that does not exist, and Fenced. After Unavailable and other errors open the
        store again and repeat the call.
        """
        state = self._ready()
        if not is_kept(self.store, state, seq):
            raise UsageError(f"lane {self.shard} has no record {seq} to roll back to")
        kept = state if seq == state.seq else self.store.state(self.shard, at=seq)
        # Consistent states that were given up since stay given up.
        still = {seal.seq for seal in state.sealed} | {seq}
        kept.sealed = [seal for seal in kept.sealed if seal.seq in still]
        self._publisher.dead = Unavailable(
            f"{self.store.where}: a rollback did not finish",
            hint="open the store again and repeat the rollback",
        )
        try:
            found = self._claim_again(state)
            kept.past = False
            self._begin(found, kept, epoch=found.term.number, back=True)
        except Fenced as error:
            self._publisher.dead = error
            raise
        self._publisher.dead = None

    # --- space: see scarctl.store.gc ------------------------------------------------------------------------

    def compact(self, ids: Ids, pieces: Pieces, encoding: Encoding = "exact") -> Record:
        """Move the newest copies of `ids` (ascending) into a new segment. `pieces`: their bytes, as they are stored.

        The copies keep their versions. Raises Corruption if the bytes are not those of the copies, and as `commit`
        does.
        """
        state = self._ready()
        at = state.find(ids)
        record = replace(self._next(DELTA, max(state.step, 0), mixed=True), partitions=len(ids))
        record, tail = self._publisher.segment(
            record, ids, pieces, versions=state.version[at], encoding=encoding
        )
        if not np.array_equal(tail.checksums, state.checksum[at]):
            self._publisher.discard(record)
            raise Corruption(f"{self.store.where}: lane {self.shard}: copies changed while they were moved")
        self._publish(record, tail)
        return record

    def repeat(self) -> None:
        """Commit a full record that changes nothing: earlier segments without a newest copy are then not needed.

        Raises as `commit` does.
        """
        state = self._ready()
        record = self._next(FULL, state.step, mixed=False)
        self._publish(*self._publisher.segment(record, np.empty(0, np.int64), None))

    def renew(self) -> None:
        """Begin a term that goes on with the same state, so that the records of the one before can be collected.

        Raises as `commit` does.
        """
        self._renewing = True  # if this fails, the next commit begins with it
        self._ready()

    def _renew(self, state: ShardState) -> None:
        try:
            found = self._claim_again(state)
            if found.base is None or found.base.place != state.place:
                raise self._publisher.fence()
            self._begin(found, state, epoch=self.epoch)
        except Fenced as error:
            self._publisher.dead = error
            raise

    def _claim_again(self, state: ShardState) -> Claim:
        assert state.place is not None, "a term begins with a record"
        return claim(self.store, self.shard, self._claimed, above=state.place.number)

    def check(self) -> None:
        """Look whether the term is still this writer's. Raises Fenced if not; Unavailable, AccessDenied."""
        self._usable()
        self._publisher.check()

    def accompany(self, companion: Companion | None) -> None:
        """Have `companion`, unless None, note the current line, and every new one."""
        self._companion = companion
        self._introduce()

    def is_settled(self) -> bool:
        """Return whether the newest record is known."""
        return not self._publisher.in_doubt

    # --- terms ----------------------------------------------------------------------------------------------

    def _begin(self, found: Claim, state: ShardState, *, epoch: int, back: bool = False) -> None:
        """Put the first record of a claimed term, which is full, and acknowledge it."""
        if state.layout is None:
            state = ShardState(self.shard, self.layout)
        if not np.array_equal(state.ids, self._ids):
            state.set_members(self._ids)
            state.whole = ""
        place = found.term.place(1)
        record = Record(
            shard=self.shard,
            place=place,
            kind=FULL,
            epoch=epoch,
            step=state.step,
            layout=self.layout.digest,
            full=1,
            seal=state.seal,
            line=Line(place.id, 1) if back or found.base is None else state.line,
            base=state.place,
        )
        self._publisher.begin(found.term, found.base, state)
        self._publish(*self._publisher.segment(record, np.empty(0, np.int64), None))

    def _publish(self, record: Record, tail: Tail) -> None:
        self._publisher.publish(record, tail)
        self._acknowledged(record)

    def _acknowledged(self, record: Record) -> None:
        if record.first:
            self._began(record)
        elif self._companion is not None and record.changes:
            self._companion.note(record.line)

    def _began(self, record: Record) -> None:
        """Note that the first record of a term is acknowledged."""
        self._renewing = False
        if record.epoch != self.epoch:
            self.epoch, self._floor = record.epoch, 0
        self._introduce()

    def _introduce(self) -> None:
        if self._companion is not None:
            line, own = self.state.line, self.term.id
            if line.id == own:
                self._companion.begin_line(line, NO_LINE)
            else:
                self._companion.begin_line(Line(own, 0), line)

    def _next(self, kind: str, step: int, *, mixed: bool, extras: bool = False) -> Record:
        """Return the record that follows the newest one, without its segment; it has changed nothing yet."""
        state = self.state
        assert state.place is not None, "a term begins with a record"
        place = state.place._replace(k=state.place.k + 1)
        return Record(
            shard=self.shard,
            place=place,
            kind=kind,
            parent=state.digest,
            epoch=self.epoch,
            step=step,
            layout=self.layout.digest,
            full=place.k if kind == FULL else state.full,
            seal=state.seal,
            line=state.line,
            mixed=mixed,
            extras=extras,
        )

    @staticmethod
    def _is_due(state: ShardState, count: int) -> bool:
        """Return whether a commit of `count` partitions should have the table, so that few records are read back."""
        if count == len(state.ids):
            return True  # it costs nothing
        records = state.records + 1 - state.full
        half = records >= FULL_LEAST and len(state.ids) <= 2 * (state.since + count)
        return half or records >= FULL_RECORDS

    # --- checks ---------------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this store was opened for writing before a fork: only its parent may commit")
        if self._publisher.dead is not None:
            raise self._publisher.dead
        if self._closed:
            raise UsageError("this store's writer is closed", hint="open the store again")

    def _ready(self) -> ShardState:
        """Return the state, once the newest record is known. Raises as `commit` does."""
        self._usable()
        if (record := self._publisher.settle()) is not None:
            self._acknowledged(record)
            if record.changes:
                self._floor = record.step
        if self._renewing:
            self._renew(self.state)
        return self.state


def _checked_ids(
    state: ShardState, ids: Ids, step: int, floor: int, *, sealed: bool, extras: object | None
) -> Ids:
    """Return `ids` in ascending order, if they may be committed as of `step` to the lane with this state.

    floor: the step of the writer's newest commit.

    Raises UsageError.
    """
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is not in 0..{MAX_STEP}")
    if step < floor:
        raise UsageError(
            f"step {step} goes backwards: step {floor} is saved already",
            hint="steps must not decrease; after a rollback open the store again",
        )
    unique = ascending(ids)
    if len(unique) != np.size(ids):
        raise UsageError("a partition is listed twice")
    at = state.require_members(unique)
    if not len(unique) and not sealed and extras is None:
        raise UsageError("nothing to commit: no partitions, no extras and not sealed")
    if sealed:
        assert state.layout is not None, "the first record came first"
        state.require_sealable(at, state.layout)
    return unique


def _checked_versions(
    state: ShardState, ids: Ids, epoch: int, step: int, steps: Ids
) -> NDArray[np.int64] | None:
    """Return the version of each copy of `ids` (ascending), if they are of these steps; None if all are of `step`.

    Raises UsageError if there is not one step for each, from 0 to `step`, or a saved copy is newer.
    """
    if len(steps) != len(ids):
        raise UsageError(f"{len(steps)} steps are given for {len(ids)} partitions")
    if bool((steps == step).all()):
        return None
    if int(steps.min()) < 0 or int(steps.max()) > step:
        raise UsageError(f"a commit of step {step} can have copies of steps 0 to {step} only")
    versions = steps + np.int64(pack(epoch, 0))
    if (back := versions < state.version[state.find(ids)]).any():
        raise UsageError(f"partition {int(ids[back][0])}: its saved copy is newer than step {steps[back][0]}")
    return versions
