"""Publishing a record: the one moment at which a commit happens, and what is done when its outcome is not known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scarctl.errors import ScarError
from scarctl.store.blob import InDoubt
from scarctl.store.format import record_path, segment_path
from scarctl.store.record import Record
from scarctl.store.segment import Tail

if TYPE_CHECKING:
    from scarctl.store.store import Store


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A record that is visible but perhaps not durable, and what it would do to the state."""

    record: Record
    tail: Tail | None


class Publisher:
    """Publishes the records of one writer. `advance` is called once for each, when it is there and durable."""

    def __init__(self, store: Store, advance: Callable[[Record, Tail | None], None]) -> None:
        self._store = store
        self._advance = advance
        self._doubts: dict[int, _Doubt] = {}

    def publish(self, record: Record, tail: Tail | None) -> None:
        """Creates the record and applies it. Raises FileExistsError if another stands there, InDoubt, or what
        `create_exclusive` raises; the segment is deleted when the record is known not to be there.
        """
        # Until the outcome is known, also over an interrupt.
        self._doubts[record.shard] = _Doubt(record, tail)
        try:
            self._store.blobs.create_exclusive(record_path(record.shard, record.seq), [record.data])
        except InDoubt:
            raise
        except FileExistsError:
            # On an object store a lost answer looks like this.
            if self.there(record).write_id != record.write_id:
                self._drop(record)
                raise
        except ScarError:
            self._drop(record)
            raise
        self._succeed(record, tail)

    def settle(self, shard: int) -> None:
        """Finds out about the record that was in doubt. Raises InDoubt if that fails again."""
        doubt = self._doubts.get(shard)
        if doubt is None:
            return
        try:
            there = self._store.blobs.settle(record_path(shard, doubt.record.seq), doubt.record.data)
        except FileExistsError:
            there = False
        if there:
            self._succeed(doubt.record, doubt.tail)
        else:
            self._drop(doubt.record)  # if another record stands there, the commit that follows is fenced

    def is_settled(self, shard: int) -> bool:
        """Whether it is known what the newest record of a shard is."""
        return shard not in self._doubts

    def there(self, record: Record) -> Record:
        """The record that stands where `record` was to be."""
        return self._store.log(record.shard).record(record.seq)

    def discard(self, record: Record) -> None:
        """Deletes the segment of a record that is not there."""
        if record.segment is not None:
            # Best effort: what stays is an orphan that no record names, and the error that led here matters more.
            with contextlib.suppress(ScarError, OSError):
                self._store.blobs.delete(segment_path(record.shard, record.segment.name))

    def _succeed(self, record: Record, tail: Tail | None) -> None:
        self._advance(record, tail)
        del self._doubts[record.shard]

    def _drop(self, record: Record) -> None:
        del self._doubts[record.shard]
        self.discard(record)
