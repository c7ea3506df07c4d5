"""Commit to a store: epochs, fencing and the commit protocol (docs/FORMAT.md, section 8)."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Contention, Corruption, Fenced, Overwritten, ScarError, Unavailable, UsageError
from scarctl.state import codec
from scarctl.state.encodings import Encoding
from scarctl.state.layout import Layout, members_by_shard
from scarctl.state.version import MAX_EPOCH
from scarctl.store.commit import Publisher, checked_ids, checked_versions
from scarctl.store.encoder import Encoder
from scarctl.store.format import record_path, segment_name, segment_path, shard_folder
from scarctl.store.index import INDEX_BYTES, INDEX_LEAST, INDEX_RECORDS
from scarctl.store.ledger import Ledger
from scarctl.store.line import Companion
from scarctl.store.lock import for_a_writer
from scarctl.store.record import Record
from scarctl.store.segment import Pieces, SegmentRef, Source, Tail
from scarctl.store.segment_writer import write_segment
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import is_kept
from scarctl.store.store import Store
from scarctl.store.topology import refuse_ranks, require_current
from scarctl.util.arrays import Ids

_log = logging.getLogger(__name__)

_WORTH = 16  # least number of records without partitions for which closing writes an index
_ATTEMPTS = 16
_RARE = 400  # state bytes per byte of a second index


def open_writer(store: Store, *, layout: Layout, shard_of: NDArray[np.int32] | None = None) -> StoreWriter:
    """Open a store for writing. Start a new epoch in every log, which fences all older writers.

    shard_of: number of the log of every partition, int32 of shape (layout.partitions,); -1: in none. Default: the
        store's own division, `Store.log_of`.

    Raises Contention if another live process writes; LayoutMismatch if the store holds another layout; UsageError
    (also for a whole store of several ranks), Corruption, AccessDenied, Unavailable; Fenced as `require_current` does.
    """
    return StoreWriter(store, layout, store.log_of(layout) if shard_of is None else shard_of)


class StoreWriter:
    """The one writer of a store, see `open_writer`.

    Every commit updates `states`, whose arrays are read-only for callers. Several threads may `commit`, each to another
    shard. Use other methods in one thread. A forked child cannot use the writer.
    """

    epoch: int
    members: dict[int, Ids]
    """The partitions of every log that this writer was opened for."""
    states: dict[int, ShardState]
    """State of every shard in the store."""
    ledger: Ledger
    """Counts of written bytes, for collectors and for display."""

    def __init__(self, store: Store, layout: Layout, shard_of: NDArray[np.int32]) -> None:
        if shard_of.shape != (layout.partitions,):
            raise UsageError(f"shard_of has shape {shard_of.shape}, not ({layout.partitions},)")
        self.store = store
        self.layout = layout
        self._blobs = store.blobs
        # A rank without rows still has a log.
        nothing = {} if store.part is None else {store.part.shard: np.empty(0, np.int64)}
        self.members = nothing | members_by_shard(shard_of)
        self._pid = os.getpid()
        self._dead: ScarError | None = None  # why no commit is possible
        self._publisher = Publisher(store, self._advance, lambda shard: self.states[shard].boundary)
        self._floor: dict[int, int] = {}  # the step of the newest commit in this epoch
        self._closed = False
        self.epoch, self.states, self.ledger = 0, {}, Ledger()
        self._lock = for_a_writer(store.take_lock)
        try:
            refuse_ranks(store)
            current = store.current_layout()
            if current is not None and current != layout:
                raise store.mismatch(current, layout)
            store.put_layout(layout)
            self._take_over()
            require_current(store)
        except BaseException:
            store.return_lock(self._lock)
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write indexes that speed up the next opening, and release the lock. The second call does nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        try:
            if self._dead is None:
                for shard, state in self.states.items():
                    worth = state.unindexed or state.unindexed_records >= _WORTH
                    # If one index cannot be written, others would fail, too.
                    if worth and self.is_settled(shard) and not self._write_index(shard):
                        break
        finally:
            self._closed, self._publisher.companion = True, None
            self.store.return_lock(self._lock)

    # --- commits --------------------------------------------------------------------------------------------

    def commit(
        self,
        shard: int,
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
        """Save the partitions `ids` (int64, members of `shard`, any order) as of `step`; durable on return.

        source: an Encoder stores encoded copies, which seal nothing.
        steps: the step of each copy, for ids in ascending order; at most `step`. None: all are of `step`.
        sealed: with this record every member's newest copy is of this step: members not in `ids` have not changed since
            they were saved. `ids` may then be empty.
        whole: name of the commit of the whole state that a sealed record belongs to; see `Record.whole`.
        extras: saved whole with the commit (see `scarctl.state.codec`); None: no extras.
        verify_source: called after the data are written; False discards the segment and raises Overwritten.

        Raises UsageError (nothing written), Fenced (by a newer writer, permanently), Overwritten. Raises Unavailable or
        AccessDenied if the commit did not happen, except kind "in-doubt": the next commit settles that first. After an
        error the store is readable at its last acknowledged commit. Except after Fenced, committing again is possible.
        """
        self._usable()
        state = self._state(shard)
        self._publisher.settle(shard)
        ids = checked_ids(state, ids, step, self.floor(shard), sealed=sealed, extras=extras)
        if sealed and isinstance(source, Encoder):
            raise UsageError("a sealed commit cannot have encoded copies", hint="commit exact ones")
        versions = None if steps is None else checked_versions(state, ids, self.epoch, step, steps)
        record = self._next(state, "commit", step, sealed=sealed, whole=whole, mixed=versions is not None)
        tail = None
        if len(ids) or extras is not None:
            ref, checksums = self._segment(
                record, ids, source, extras=extras, verify_source=verify_source, versions=versions
            )
            record = replace(record, segment=ref, partitions=len(ids), extras=extras is not None)
            tail = Tail(ids, checksums, versions)
        elif verify_source is not None and not verify_source():
            raise Overwritten(
                f"shard {shard}: partitions changed before the commit of step {step}", hint="commit again"
            )
        self._publish_next(record, tail)
        self.ledger.handed(shard, record.nbytes)
        self._floor[shard] = step
        # Until an index exists, one small segment has the only list of the members, which all else needs.
        none = state.unindexed_records > state.seq
        half = (none or state.unindexed_records >= INDEX_LEAST) and 0 < len(state.ids) <= 2 * state.unindexed
        if half or state.unindexed_records >= INDEX_RECORDS:
            self._write_index(shard)
        return record

    def floor(self, shard: int) -> int:
        """Return the step of the newest commit to a shard in this epoch, the least for the next one; 0 without one."""
        return self._floor.get(shard, 0)

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """Start a new epoch in which shard s has its state after record `seqs[s]`. Other shards stay unchanged.

        Later records are never seen again. Raises UsageError for a record that does not exist, and Fenced. After
        Unavailable and other errors some shards may be rolled back: open the store again and repeat the call.
        """
        self._usable()
        for shard, seq in seqs.items():
            state = self._state(shard)
            if not is_kept(self.store, state, seq):
                raise UsageError(f"shard {shard} has no record {seq} to roll back to")
        self._dead = Unavailable(
            f"{self.store.where}: a rollback did not finish",
            hint="open the store again and repeat the rollback",
        )
        for shard in self.states:
            self._publisher.settle(shard)
        try:
            self._begin(dict(self.states), seqs)
        except FileExistsError:
            self._dead = Fenced(
                f"{self.store.where}: a newer writer has taken over", hint="stop this process"
            )
            raise self._dead from None
        self._dead = None
        for shard in seqs:
            self._write_index(shard)

    # --- space: see scarctl.store.gc ------------------------------------------------------------------------

    def compact(self, shard: int, ids: Ids, pieces: Pieces, encoding: Encoding = "exact") -> Record:
        """Move the newest copies of `ids` (ascending) into a new segment. `pieces`: their bytes, as they are stored.

        The copies keep their versions. Raises Corruption if the bytes are not those of the copies, and as `commit`
        does.
        """
        self._usable()
        state = self._state(shard)
        self._publisher.settle(shard)
        at = state.find(ids)
        record = self._moving(state)
        versions = state.version[at]
        ref, sums = self._segment(record, ids, pieces, versions=versions, encoding=encoding)
        record = replace(record, segment=ref, partitions=len(ids))
        if not np.array_equal(sums, state.checksum[at]):
            self._publisher.discard(record)
            raise Corruption(f"{self.store.where}: shard {shard}: copies changed while they were moved")
        self._publish_next(record, Tail(ids, sums, versions))
        return record

    def advance_boundary(self, shard: int, keep: frozenset[int]) -> int:
        """Give up all records before the newest one, except `keep`. Return the first record that is still needed.

        Obsolete files may be deleted only after this returns. Raises Corruption if damage hides the newest copies, and
        as `commit` does. After an error all files are needed as before.
        """
        self._usable()
        state = self._state(shard)
        self._publisher.settle(shard)
        if state.doubt.any():
            raise Corruption(f"{self.store.where}: shard {shard} has a damaged segment: nothing is collected")
        sealed = state.sealed
        state.sealed = [seal for seal in sealed if seal.seq == state.seq or seal.seq in keep]
        try:
            if not self.put_index(state) and state.sealed != sealed:
                # The existing index lists states that this gives up, but a rollback relies on the boundary's list.
                self._publish_next(self._moving(state), None)
                self.put_index(state)
            boundary = state.seq
            self._publish_next(replace(self._moving(state), boundary=boundary), None)
        except BaseException:
            state.sealed = sealed
            raise
        state.unindexed_records, state.unindexed = 1, 0  # the record of the boundary itself
        # A second index, if it is cheap, so that one damaged file does not lose a shard.
        if INDEX_BYTES * len(state.ids) * _RARE <= self.layout.nbytes:
            self._write_index(shard)
        return boundary

    def put_index(self, state: ShardState) -> bool:
        """Write the index of a state, the newest or a past one; False if an intact index exists. See `ShardLog`."""
        nbytes = self.store.log(state.shard).put_index(state)
        self.ledger.wrote(state.shard, nbytes)
        return nbytes > 0

    def _moving(self, state: ShardState) -> Record:
        """Return the next record, if it saves no new copies."""
        return self._next(state, "compact", max(state.step, 0), line=state.line)

    def _next(self, tip: ShardState, kind: str, step: int, **more: Any) -> Record:
        """Return the record that follows `tip`, the newest state of a shard. more: further fields of `Record`."""
        return Record(
            seq=tip.seq + 1,
            shard=tip.shard,
            kind=kind,
            epoch=self.epoch,
            step=step,
            parent=tip.tail_digest,
            layout=self.layout.digest,
            boundary=tip.boundary,
            **more,
        )

    @property
    def lines(self) -> dict[int, int]:
        """The current line of each shard's log: see `scarctl.store.line`."""
        return dict(self._publisher.lines)

    def accompany(self, companion: Companion | None) -> None:
        """Have `companion`, unless None, note the current lines, and every new one."""
        self._publisher.companion = companion
        if companion is not None:
            companion.begin_lines(self.lines)

    def is_settled(self, shard: int) -> bool:
        """Return whether the newest record of a shard is known."""
        return self._publisher.is_settled(shard)

    # --- epochs ---------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Commit an epoch record, with the highest epoch, to every log in ascending order of shards."""
        for _ in range(_ATTEMPTS):
            tips = self.store.states(sorted({*self.store.shards(), *self.members}))
            try:
                self._prepare(tips)
                self._begin(tips, {})
                return
            except FileExistsError:
                continue  # another writer begins concurrently: the higher epoch wins
        raise Contention(
            f"{self.store.where}: other writers keep opening this store",
            hint="let only one process write to it",
        )

    def _prepare(self, tips: Mapping[int, ShardState]) -> None:
        for shard in self.members:
            for folder in ("seg", "log", "index"):
                # A writer makes a shard's folders durable before it writes a record there.
                self._blobs.prepare(f"{shard_folder(shard)}/{folder}", known=tips[shard].seq >= 0)

    def _begin(self, tips: Mapping[int, ShardState], bases: Mapping[int, int]) -> None:
        epoch = max((tip.epoch for tip in tips.values()), default=0) + 1
        if self.store.part is not None:
            epoch = max(epoch, self.store.part.epoch)
        if epoch > MAX_EPOCH:
            raise UsageError(f"{self.store.where}: the epochs are used up", hint="use another folder")
        self.epoch = epoch
        for shard, tip in tips.items():
            self._begin_shard(tip, bases.get(shard))

    def _begin_shard(self, tip: ShardState, base: int | None) -> None:
        shard = tip.shard
        state = tip if base is None else self.store.state(shard, at=base)
        record = self._next(tip, "epoch", state.step, base=base, line=tip.line if base is None else "")
        members = self.members.get(shard, state.ids)
        tail = None
        if state.layout != self.layout or not np.array_equal(members, state.ids):
            ref, _ = self._segment(record, members, None)
            record = replace(record, segment=ref, partitions=len(members))
            tail = Tail(members, None, None)
        state.records, state.boundary = tip.records, tip.boundary
        self.states[shard] = state
        self._floor.pop(shard, None)
        self._publisher.publish(record, tail)

    # --- the protocol ---------------------------------------------------------------------------------------

    def _segment(
        self,
        record: Record,
        ids: Ids,
        source: Source | Pieces | Encoder | None,
        *,
        extras: object | None = None,
        verify_source: Callable[[], bool] | None = None,
        versions: NDArray[np.int64] | None = None,
        encoding: Encoding = "exact",
    ) -> tuple[SegmentRef, NDArray[np.uint64]]:
        """Write a segment durably. Return its reference and checksums uint64[len(ids)]. On failure delete it."""
        metadata = {name: str(getattr(record, name)) for name in ("layout", "shard", "epoch", "step")}
        tensors: Mapping[str, codec.RawTensor] = {}
        if extras is not None:
            metadata["extras"], tensors = codec.encode(extras)
        name = segment_name(self.epoch, uuid.uuid4().hex)
        with self._blobs.writer(segment_path(record.shard, name)) as out:
            ref, checksums = write_segment(
                out,
                name,
                self.layout,
                ids,
                source,
                metadata,
                kind=record.segment_kind,
                encoding=source.encoding if isinstance(source, Encoder) else encoding,
                extras=tensors,
                versions=versions,
            )
            if verify_source is not None and not verify_source():
                raise Overwritten(
                    f"shard {record.shard}: partitions changed while step {record.step} was written",
                    hint="commit again",
                )
            out.commit()
        self.ledger.wrote(record.shard, ref.nbytes)
        return ref, checksums

    def _publish_next(self, record: Record, tail: Tail | None) -> None:
        """Publish a record of this epoch. Raises Fenced if another record has its number."""
        try:
            self._publisher.publish(record, tail)
        except FileExistsError:
            other = self._publisher.there(record)
            by = f": epoch {other.epoch} of {other.writer}" if other and other.epoch > self.epoch else ""
            self._dead = Fenced(
                f"{self.store.where}: a newer writer has taken over{by}, this one has epoch {self.epoch}",
                hint="stop this process; its earlier commits are safe",
            )
            raise self._dead from None

    def _advance(self, record: Record, tail: Tail | None) -> None:
        """Apply a durable record to the state."""
        state = self.states[record.shard]
        if state.seq < record.seq:
            self.ledger.committing(state, record, tail)
            self.ledger.wrote(record.shard, len(record.data))
            state.apply(record, self.layout, tail, self._blobs.where(record_path(record.shard, record.seq)))
            state.records += 1

    def _write_index(self, shard: int) -> bool:
        """Write the index of the current state. Return whether that succeeded. A failure is only logged."""
        state = self.states[shard]
        if state.doubt.any() or state.seq < 0:
            return True  # an index cannot represent doubt
        try:
            self.put_index(state)
        except ScarError as error:
            _log.warning("an index was not written, so the next opening reads more of the log: %s", error)
            return False
        state.unindexed_records = state.unindexed = 0
        return True

    # --- checks ---------------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this store was opened for writing before a fork: only its parent may commit")
        if self._dead is not None:
            raise self._dead
        if self._closed:
            raise UsageError("this store's writer is closed", hint="open the store again")

    def _state(self, shard: int) -> ShardState:
        if shard not in self.states:
            raise UsageError(f"this store has no shard {shard}", hint=f"it has {sorted(self.states)}")
        return self.states[shard]
