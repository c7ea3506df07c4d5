"""Commit to a store: epochs, fencing and the commit protocol (docs/FORMAT.md, section 8)."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Contention, Corruption, Fenced, Overwritten, ScarError, Unavailable, UsageError
from scarctl.state import codec
from scarctl.state.layout import Layout, members_by_shard
from scarctl.state.version import MAX_EPOCH, MAX_STEP
from scarctl.store.commit import Publisher
from scarctl.store.format import record_path, segment_name, segment_path, shard_folder
from scarctl.store.index import INDEX_BYTES, INDEX_RECORDS
from scarctl.store.ledger import Ledger
from scarctl.store.line import Companion
from scarctl.store.record import Record
from scarctl.store.segment import Pieces, SegmentRef, Source, Tail, ascending
from scarctl.store.segment_writer import write_segment
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import is_kept
from scarctl.store.store import Store
from scarctl.store.topology import refuse_ranks
from scarctl.util.arrays import Ids

_log = logging.getLogger(__name__)

_WORTH = 16  # records without partitions that make an index worth its bytes when the store is closed
_ATTEMPTS = 16
_RARE = 400  # state bytes per byte of a second index


def open_writer(store: Store, *, layout: Layout, shard_of: NDArray[np.int32]) -> StoreWriter:
    """Open a store for writing. Start a new epoch in every shard's log, which fences all older writers.

    shard_of: shard of every partition, int32 of shape (layout.partitions,); -1: in no shard.

    Raises Contention if another live process writes; LayoutMismatch if the store holds another layout; UsageError
    (also for a whole store of several ranks), Corruption, AccessDenied, Unavailable.
    """
    return StoreWriter(store, layout, shard_of)


class StoreWriter:
    """The one writer of a store, see `open_writer`.

    `states` is kept up to date with every commit: treat its arrays as read-only. Several threads may `commit`, each to
    another shard; all else is for one thread. A forked child cannot use it.
    """

    epoch: int
    states: dict[int, ShardState]
    """State of every shard in the store."""
    ledger: Ledger
    """Bytes that were written, for collectors and for people."""

    def __init__(self, store: Store, layout: Layout, shard_of: NDArray[np.int32]) -> None:
        if shard_of.shape != (layout.partitions,):
            raise UsageError(f"shard_of has shape {shard_of.shape}, not ({layout.partitions},)")
        self.store = store
        self.layout = layout
        self._blobs = store.blobs
        # A rank that owns nothing has a log all the same.
        nothing = {} if store.part is None else {store.part.shard: np.empty(0, np.int64)}
        self._members = nothing | members_by_shard(shard_of)
        self._pid = os.getpid()
        self._dead: ScarError | None = None  # why nothing can be committed any more
        self._publisher = Publisher(store, self._advance, lambda shard: self.states[shard].boundary)
        self._floor: dict[int, int] = {}  # the step of the newest commit in this epoch
        self._closed = False
        self.epoch = 0
        self.states = {}
        self.ledger = Ledger()
        self._lock = store.take_lock()
        try:
            refuse_ranks(store)
            current = store.current_layout()
            if current is not None and current != layout:
                raise store.mismatch(current, layout)
            store.put_layout(layout)
            self._take_over()
        except BaseException:
            store.return_lock(self._lock)
            raise

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the indexes that save time at the next opening and free the lock. The second time does nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        try:
            if self._dead is None:
                for shard, state in self.states.items():
                    worth = state.unindexed or state.unindexed_records >= _WORTH
                    # A store that does not take one index takes no other now.
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
        source: Source,
        *,
        step: int,
        sealed: bool = False,
        whole: str = "",
        extras: object | None = None,
        verify_source: Callable[[], bool] | None = None,
    ) -> Record:
        """Save the partitions `ids` (int64, members of `shard`, any order) as of `step`; durable when it returns.

        sealed: with this record every member's newest copy is of this step: what is not in `ids` has not changed since
            it was saved. `ids` may then be empty.
        whole: of which commit of the whole state a sealed one is a part; see `Record.whole`.
        extras: saved whole with the commit (see `scarctl.state.codec`); None: none.
        verify_source: asked after the data are written; False discards the segment and raises Overwritten.

        Raises UsageError (nothing written); Fenced (a newer writer; this one is done); Overwritten; Unavailable or
        AccessDenied: the commit did not happen, except kind "in-doubt": then the next commit settles it first. After
        any of them the store is readable at its last acknowledged commit, and committing again is possible.
        """
        self._usable()
        state = self._state(shard)
        self._publisher.settle(shard)
        ids = self._checked(state, ids, step, sealed, extras)
        record = Record(
            seq=state.seq + 1,
            shard=shard,
            kind="commit",
            epoch=self.epoch,
            step=step,
            parent=state.tail_digest,
            layout=self.layout.digest,
            sealed=sealed,
            whole=whole,
            boundary=state.boundary,
        )
        tail = None
        if len(ids) or extras is not None:
            ref, checksums = self._segment(
                record, ids, source, "commit", extras=extras, verify_source=verify_source
            )
            record = replace(record, segment=ref, partitions=len(ids), extras=extras is not None)
            tail = Tail(ids, checksums, None)
        elif verify_source is not None and not verify_source():
            raise Overwritten(
                f"shard {shard}: partitions changed before the commit of step {step}", hint="commit again"
            )
        self._publish_next(record, tail)
        self.ledger.handed(record.nbytes)
        self._floor[shard] = step
        if state.unindexed_records >= INDEX_RECORDS or 0 < len(state.ids) <= 2 * state.unindexed:
            self._write_index(shard)
        return record

    def _checked(self, state: ShardState, ids: Ids, step: int, sealed: bool, extras: object | None) -> Ids:
        if not 0 <= step <= MAX_STEP:
            raise UsageError(f"step {step} is not in 0..{MAX_STEP}")
        if step < self._floor.get(state.shard, 0):
            raise UsageError(
                f"step {step} goes backwards: step {self._floor[state.shard]} is saved already",
                hint="steps must not decrease; after a roll-back open the store again",
            )
        unique = ascending(ids)
        if len(unique) != np.size(ids):
            raise UsageError("a partition is given twice")
        at = state.require_members(unique)
        if not len(unique) and not sealed and extras is None:
            raise UsageError("nothing to commit: no partitions, no extras and not sealed")
        if sealed:
            state.require_sealable(at, self.layout)
        return unique

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """Start a new epoch in which shard s is as it was after record `seqs[s]`; other shards stay as they are.

        Records that came after are never seen again. Raises UsageError for a record that does not exist;
        Fenced; Unavailable and others: some shards may be rolled back; open the store again and repeat it.
        """
        self._usable()
        for shard, seq in seqs.items():
            state = self._state(shard)
            if not is_kept(self.store, state, seq):
                raise UsageError(f"shard {shard} has no record {seq} to roll back to")
        self._dead = Unavailable(
            f"{self.store.where}: a roll-back did not finish",
            hint="open the store again and repeat the roll-back",
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

    def compact(self, shard: int, ids: Ids, pieces: Pieces) -> Record:
        """Move the newest copies of `ids` (ascending) into a new segment. `pieces` are their bytes.

        They keep their versions, so nothing becomes newer than it is. Raises Corruption when the bytes are not those
        copies, and what `commit` raises.
        """
        self._usable()
        state = self._state(shard)
        self._publisher.settle(shard)
        at = state.find(ids)
        record = self._moving(state)
        versions = state.version[at]
        ref, sums = self._segment(record, ids, pieces, "compact", versions=versions)
        record = replace(record, segment=ref, partitions=len(ids))
        if not np.array_equal(sums, state.checksum[at]):
            self._publisher.discard(record)
            raise Corruption(f"{self.store.where}: shard {shard}: copies changed while they were moved")
        self._publish_next(record, Tail(ids, sums, versions))
        return record

    def advance_boundary(self, shard: int, keep: frozenset[int]) -> int:
        """Say that nothing before this moment is needed any more, but the records `keep`; return the first that is.

        Once this returns, and never before, what came earlier may be deleted. Raises Corruption while it is not known
        what the newest copies are, and what `commit` raises; then everything is needed as before.
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
                # The index that is there lists what is given up now. Who goes back believes the boundary's list.
                self._publish_next(self._moving(state), None)
                self.put_index(state)
            boundary = state.seq
            self._publish_next(replace(self._moving(state), boundary=boundary), None)
        except BaseException:
            state.sealed = sealed
            raise
        state.unindexed_records, state.unindexed = 1, 0  # the record of the boundary itself
        # One damaged file must not lose a shard: a second index, where it costs next to nothing.
        if INDEX_BYTES * len(state.ids) * _RARE <= self.layout.nbytes:
            self._write_index(shard)
        return boundary

    def put_index(self, state: ShardState) -> bool:
        """Write the index of a state, the newest or a past one; False if an intact one is there. See `ShardLog`."""
        nbytes = self.store.log(state.shard).put_index(state)
        self.ledger.wrote(state.shard, nbytes)
        return nbytes > 0

    def _moving(self, state: ShardState) -> Record:
        """Return the next record, when it saves nothing new."""
        return Record(
            seq=state.seq + 1,
            shard=state.shard,
            kind="compact",
            epoch=self.epoch,
            step=max(state.step, 0),
            parent=state.tail_digest,
            layout=self.layout.digest,
            boundary=state.boundary,
            line=state.line,
        )

    @property
    def lines(self) -> dict[int, int]:
        """By shard, the line of its log now: see `scarctl.store.line`."""
        return dict(self._publisher.lines)

    def accompany(self, companion: Companion | None) -> None:
        """Have `companion`, if there is one, note what the store holds, now and with every record."""
        self._publisher.companion = companion
        if companion is not None:
            companion.begin_lines(self.lines)

    def is_settled(self, shard: int) -> bool:
        """Return whether it is known what the newest record of a shard is."""
        return self._publisher.is_settled(shard)

    # --- epochs ---------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Commit an epoch record, higher than all there are, to every log in ascending order of shards."""
        for _ in range(_ATTEMPTS):
            tips = self.store.states(sorted({*self.store.shards(), *self._members}))
            try:
                self._prepare(tips)
                self._begin(tips, {})
                return
            except FileExistsError:
                continue  # another writer begins at this moment: the higher epoch wins
        raise Contention(
            f"{self.store.where}: other writers keep opening this store",
            hint="let only one process write to it",
        )

    def _prepare(self, tips: Mapping[int, ShardState]) -> None:
        for shard in self._members:
            for folder in ("seg", "log", "index"):
                # A writer makes a shard's folders durable before it writes a record there.
                self._blobs.prepare(f"{shard_folder(shard)}/{folder}", known=tips[shard].seq >= 0)

    def _begin(self, tips: Mapping[int, ShardState], bases: Mapping[int, int]) -> None:
        epoch = max((tip.epoch for tip in tips.values()), default=0) + 1
        if self.store.part is not None:
            epoch = max(epoch, self.store.part.epoch)
        if epoch > MAX_EPOCH:
            raise UsageError(f"{self.store.where}: no epochs are left", hint="use another folder")
        self.epoch = epoch
        for shard, tip in tips.items():
            self._begin_shard(tip, bases.get(shard))

    def _begin_shard(self, tip: ShardState, base: int | None) -> None:
        shard = tip.shard
        state = tip if base is None else self.store.state(shard, at=base)
        record = Record(
            seq=tip.seq + 1,
            shard=shard,
            kind="epoch",
            epoch=self.epoch,
            step=state.step,
            parent=tip.tail_digest,
            layout=self.layout.digest,
            base=base,
            boundary=tip.boundary,
            line=tip.line if base is None else "",
        )
        members = self._members.get(shard, state.ids)
        tail = None
        if state.layout != self.layout or not np.array_equal(members, state.ids):
            ref, _ = self._segment(record, members, None, "members")
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
        source: Source | Pieces | None,
        kind: str,
        *,
        extras: object | None = None,
        verify_source: Callable[[], bool] | None = None,
        versions: NDArray[np.int64] | None = None,
    ) -> tuple[SegmentRef, NDArray[np.uint64]]:
        """Write a segment durably; return its reference and checksums uint64[len(ids)]. Delete it on failure."""
        metadata = {
            "layout": record.layout,
            "shard": str(record.shard),
            "epoch": str(record.epoch),
            "step": str(record.step),
        }
        tensors: Mapping[str, codec.RawTensor] = {}
        if extras is not None:
            metadata["extras"], tensors = codec.encode(extras)
        name = segment_name(self.epoch, uuid.uuid4().hex)
        with self._blobs.writer(segment_path(record.shard, name)) as out:
            ref, checksums = write_segment(
                out, name, self.layout, ids, source, metadata, kind=kind, extras=tensors, versions=versions
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
        """Publish within the epoch: another record there means that this writer is done. Raises Fenced."""
        try:
            self._publisher.publish(record, tail)
        except FileExistsError:
            other = self._publisher.there(record)
            by = f": epoch {other.epoch} of {other.writer}" if other and other.epoch > self.epoch else ""
            self._dead = Fenced(
                f"{self.store.where}: a newer writer has taken over{by}, this one has epoch {self.epoch}",
                hint="stop this process; what it committed before is safe",
            )
            raise self._dead from None

    def _advance(self, record: Record, tail: Tail | None) -> None:
        """The record is there and durable."""
        state = self.states[record.shard]
        if state.seq < record.seq:
            self.ledger.committing(state, record, tail)
            self.ledger.wrote(record.shard, len(record.data))
            state.apply(record, self.layout, tail, self._blobs.where(record_path(record.shard, record.seq)))
            state.records += 1

    def _write_index(self, shard: int) -> bool:
        """Write the index of the state as it is; return whether that worked. A failure costs time, and is logged."""
        state = self.states[shard]
        if state.doubt.any() or state.seq < 0:
            return True  # an index cannot say what is in doubt
        try:
            self.put_index(state)
        except ScarError as error:
            _log.warning("no index written, the next opening reads more of the log: %s", error)
            return False
        state.unindexed_records = state.unindexed = 0
        return True

    # --- small things ---------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this store was opened for writing before a fork: only its parent may commit")
        if self._dead is not None:
            raise self._dead
        if self._closed:
            raise UsageError("this store's writer is closed", hint="open the store again")

    def _state(self, shard: int) -> ShardState:
        if shard not in self.states:
            raise UsageError(f"there is no shard {shard} in this store", hint=f"only {sorted(self.states)}")
        return self.states[shard]
