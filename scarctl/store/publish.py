"""Put a writer's records: the commit protocol (docs/FORMAT.md, section 6)."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Fenced, Overwritten, ScarError
from scarctl.state import codec
from scarctl.state.encodings import Encoding
from scarctl.state.layout import Layout
from scarctl.state.raw_tensor import RawTensor
from scarctl.store.backends.base import Blobs, InDoubt
from scarctl.store.claim import look, overtaken, put, require_store
from scarctl.store.compact import Ledger
from scarctl.store.encoder import Encoder
from scarctl.store.format import MAX_RECORD, MAX_TERM, segment_name, segment_path
from scarctl.store.record import FULL, Record
from scarctl.store.segment import Pieces, Source
from scarctl.store.segment_writer import write_segment
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store
from scarctl.store.table import Tail
from scarctl.store.term import Term
from scarctl.util.arrays import Ids


@dataclass(frozen=True, slots=True)
class _Pending:
    """A record that may or may not be visible or durable, and the tail of its segment."""

    record: Record
    tail: Tail


class Publisher:
    """Puts the records of one writer, one at a time: the segment, the record, and a look whether it counts.

    After Fenced, `dead` says why nothing more can be put.
    """

    def __init__(self, store: Store, layout: Layout) -> None:
        self.store = store
        self.layout = layout
        self.shard = store.lane
        self.ledger = Ledger()
        self.dead: ScarError | None = None
        self.term: Term
        self.state: ShardState
        self._tail: Record | None = None  # the newest acknowledged record; at first the base
        self._pending: _Pending | None = None

    @property
    def _blobs(self) -> Blobs:
        return self.store.blobs

    @property
    def in_doubt(self) -> bool:
        """Whether it is unknown if the newest record counts: `settle` finds out."""
        return self._pending is not None

    def begin(self, term: Term, base: Record | None, state: ShardState) -> None:
        """Go on with the first record of a term, above a base and its state."""
        self._blobs.prepare(term.folder)
        self.term, self._tail, self.state = term, base, state

    def segment(
        self,
        record: Record,
        ids: Ids,
        source: Source | Pieces | Encoder | None,
        *,
        extras: object | None = None,
        verify_source: Callable[[], bool] | None = None,
        versions: NDArray[np.int64] | None = None,
        encoding: Encoding = "exact",
    ) -> tuple[Record, Tail]:
        """Write a record's segment durably. Return the complete record, and the tail. On failure delete the segment."""
        self._check_claim()
        metadata = {"kind": record.kind, "layout": record.layout, "lane": str(self.shard)}
        metadata |= {"epoch": str(record.epoch), "step": str(record.step)}
        tensors: Mapping[str, RawTensor] = {}
        if extras is not None:
            metadata["extras"], tensors = codec.encode(extras)
        table = None
        if record.kind == FULL:
            table = self.state.table(record, self.layout, ids)
            record = replace(record, rest=len(table.ids), unsaved=len(table.unsaved), doubt=len(table.doubt))
        name = segment_name(self.term.number, uuid.uuid4().hex)
        with self._blobs.writer(segment_path(self.shard, name)) as out:
            ref, checksums = write_segment(
                out,
                name,
                self.layout,
                ids,
                source,
                metadata,
                encoding=source.encoding if isinstance(source, Encoder) else encoding,
                extras=tensors,
                versions=versions,
                table=table,
            )
            if verify_source is not None and not verify_source():
                raise Overwritten(
                    f"lane {self.shard}: partitions changed while step {record.step} was written",
                    hint="commit again",
                )
            out.commit()
        self.ledger.written_bytes += ref.nbytes
        return replace(record, segment=ref), Tail(ids, checksums, versions, table)

    def publish(self, record: Record, tail: Tail, *, again: bool = False) -> None:
        """Create a record, look, and apply it. again: an earlier request may still arrive.

        Raises Fenced if another record has its number, or the term is over; InDoubt, and as `create_exclusive` does. If
        the record certainly does not exist, its segment is deleted.
        """
        # Keep the record until its outcome is known, even after an interrupt.
        self._pending = _Pending(record, tail)
        path = record.place.path(self.shard)
        try:
            mine = put(self._blobs, path, record.data, MAX_RECORD)
        except InDoubt:
            raise
        except ScarError as error:
            if again:
                raise self._unknown(record, error) from error
            self._pending = None
            self.discard(record)
            self._check_claim()  # its folder is gone if the store was removed, and made anew
            raise
        if not mine:
            self._pending = None
            self.discard(record)
            raise self.fence()
        self._acknowledge(record, tail)

    def settle(self) -> Record | None:
        """Put the record that was in doubt again, with the same bytes, and return it; None without one."""
        pending = self._pending
        if pending is None:
            return None
        try:
            self._check_claim()
        except Fenced:
            self._pending = None
            raise
        except ScarError as error:
            raise self._unknown(pending.record, error) from error
        self.publish(pending.record, pending.tail, again=True)
        return pending.record

    def check(self) -> None:
        """Look whether the term is still this writer's. Raises Fenced if not; Unavailable, AccessDenied."""
        self._look((), ())

    def _acknowledge(self, record: Record, tail: Tail) -> None:
        """Look whether the term is still this writer's, and whether what it has put is there; then apply the record."""
        before = () if self._tail is None else (self._tail,)
        assert record.segment is not None, "a commit has a segment"
        own = segment_path(self.shard, record.segment.name)
        try:
            self._look((*before, record), (own,))
        except Fenced:
            self._pending = None
            raise
        except ScarError as error:
            raise self._unknown(record, error) from error
        if record.changes and len(tail.ids):
            self.ledger.lives.saved(self.state, self.state.find(tail.ids), record.step)
        self.ledger.written_bytes += len(record.data)
        self.state.apply(record, self.layout, tail, self._where(record))
        self._tail, self._pending = record, None

    def _look(self, records: tuple[Record, ...], segments: tuple[str, ...]) -> None:
        try:
            look(self.store, self.term, records, segments)
        except Fenced as error:
            self.dead = error
            raise

    def _unknown(self, record: Record, error: ScarError) -> InDoubt:
        """Return the error for a record of which it is not known whether it counts. Raises Fenced if it never can."""
        try:
            self._require_store()
        except Fenced:
            raise
        except ScarError as away:
            error = away
        return InDoubt(
            f"{self._where(record)}: it is not known whether it counts ({error.message})",
            hint="acknowledged commits are safe; the next commit settles this one",
        )

    def discard(self, record: Record) -> None:
        """Delete the segment of a record that does not exist."""
        if record.segment is not None:
            # On failure the segment stays as an orphan, which is harmless. The original error matters more.
            with contextlib.suppress(ScarError, OSError):
                self._blobs.delete(segment_path(self.shard, record.segment.name))

    def _check_claim(self) -> None:
        """Raise Fenced if the claim is gone, or another store's: nothing may be written there."""
        for again in (False, True):
            with contextlib.suppress(FileNotFoundError):
                if self._blobs.read(self.term.path, MAX_TERM) == self.term.data:
                    return
            if not again:
                self._require_store()  # which may have come back just before
        raise self.fence()

    def _require_store(self) -> None:
        """See `require_store`. Remembers that another store is in the place of this one."""
        try:
            require_store(self.store)
        except Fenced as replaced:
            self._pending, self.dead = None, replaced
            raise

    def fence(self) -> Fenced:
        """Return why this writer may not go on, and remember it."""
        self.dead = error = overtaken(self.store, self.shard, self.term.number)
        return error

    def _where(self, record: Record) -> str:
        """Return where a record is, for messages."""
        return self.store.blobs.where(record.place.path(self.shard))
