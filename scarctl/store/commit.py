"""Publish a record: the one moment at which a commit happens. Settle records whose outcome is not known."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scarctl.errors import ScarError, Unavailable
from scarctl.store.backends.base import InDoubt
from scarctl.store.format import SETTINGS, record_path, segment_path
from scarctl.store.line import Companion, number_of
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

    def __init__(
        self, store: Store, advance: Callable[[Record, Tail | None], None], boundary: Callable[[int], int]
    ) -> None:
        """boundary: that of a shard's log, as its writer knows it."""
        self._store = store
        self._advance = advance
        self._boundary = boundary
        self._doubts: dict[int, _Doubt] = {}
        self.lines: dict[int, int] = {}
        """By shard, the line of the newest record published."""
        self.companion: Companion | None = None

    def publish(self, record: Record, tail: Tail | None) -> None:
        """Create the record and apply it. Raises FileExistsError if another stands there or stood there, InDoubt,
        or what `create_exclusive` raises; the segment is deleted when the record is known not to be there.
        """
        # Until the outcome is known, also over an interrupt.
        self._doubts[record.shard] = _Doubt(record, tail)
        if self.companion is not None:
            self.companion.expect(record.shard, number_of(record.line))
        try:
            self._store.blobs.create_exclusive(record_path(record.shard, record.seq), [record.data])
        except InDoubt:
            raise
        except FileExistsError:
            # On an object store a lost answer looks like this.
            there = self.there(record)
            if there is None or there.write_id != record.write_id:
                self._drop(record)
                raise
        except ScarError:
            self._drop(record)
            raise
        self._conclude(record, tail)

    def settle(self, shard: int) -> None:
        """Find out about the record that was in doubt. Raises InDoubt if that fails again."""
        doubt = self._doubts.get(shard)
        if doubt is None:
            return
        path = record_path(shard, doubt.record.seq)
        try:
            there = self._store.blobs.settle(path, doubt.record.data)
            if there:
                self._conclude(doubt.record, doubt.tail)
            else:
                self._require_absent(path)
        except FileExistsError:
            there = False
        if not there and shard in self._doubts:
            self._drop(doubt.record)
        # If another record stands there, or stood there, the commit that follows is fenced.

    def is_settled(self, shard: int) -> bool:
        """Return whether it is known what the newest record of a shard is."""
        return shard not in self._doubts

    def there(self, record: Record) -> Record | None:
        """Read the record at a record's place; None if a newer writer has collected it. Raises InDoubt when the
        whole store is away.
        """
        try:
            return self._store.log(record.shard).record(record.seq)
        except FileNotFoundError:
            self._require_absent(record_path(record.shard, record.seq))
            return None

    def discard(self, record: Record) -> None:
        """Delete the segment of a record that is not there."""
        if record.segment is not None:
            # Best effort: what stays is an orphan that no record names, and the error that led here matters more.
            with contextlib.suppress(ScarError, OSError):
                self._store.blobs.delete(segment_path(record.shard, record.segment.name))

    def _conclude(self, record: Record, tail: Tail | None) -> None:
        """The record was created: applies it, unless its number was free only because a newer writer has collected
        what stood there. Raises FileExistsError then, InDoubt when that cannot be decided now.
        """
        path = record_path(record.shard, record.seq)
        try:
            newest = self._is_newest(record)
        except ScarError as error:
            raise InDoubt(
                f"{self._store.blobs.where(path)}: written, but it is not known whether a newer writer has taken over "
                f"({error.message})",
                hint="what was acknowledged is safe; the next commit settles this one",
            ) from error
        if newest:
            self._advance(record, tail)
            self.lines[record.shard] = number_of(record.line)
            if self.companion is not None:
                self.companion.note(record.shard, self.lines[record.shard])
        del self._doubts[record.shard]
        if not newest:
            # Nothing is deleted: if an answer was lost, the newer writer may have begun at this very record.
            raise FileExistsError(errno.EEXIST, "collected", path)

    def _is_newest(self, record: Record) -> bool:
        """Return whether nobody has collected the log up to the number of `record`, which is this writer's next.

        Records are deleted in ascending order, so the one that moved the boundary last, or else the first, goes before
        any of this writer's numbers becomes free. But another fenced writer, or a late request, may have taken that
        one's number again. So the indexes are listed, too: that of a boundary is there before anything is deleted.
        """
        log = self._store.log(record.shard)
        if record.seq == 0:
            numbers = log.numbers()
            self._require_store()
            return max(numbers, default=0) == 0
        boundary = self._boundary(record.shard)
        first = record_path(record.shard, boundary + 1 if boundary else 0)
        if not self._store.blobs.has(first):
            self._require_store()
            if not self._store.blobs.has(first):  # or the store is back just now
                return False
        indexes = log.indexes()
        if not indexes:
            self._require_store()
        if max(indexes, default=0) <= record.seq:
            return True
        newest = log.newest()
        if newest is None:
            self._require_store()
        return newest is not None and newest.boundary <= record.seq

    def _require_store(self) -> None:
        """Raise Unavailable while the whole store is away, as a folder is that is not mounted: what is missing there
        was not collected.
        """
        if not self._store.blobs.has(SETTINGS):
            raise Unavailable(
                f"{self._store.where}: the store is not there",
                hint="is it mounted? What was acknowledged is in it, and saving continues when it is back",
            )

    def _require_absent(self, path: str) -> None:
        """Raise InDoubt unless there is a store, without such a record."""
        try:
            self._require_store()
            there = self._store.blobs.has(path)
        except ScarError as error:
            raise InDoubt(error.message, hint=error.hint) from error
        if there:
            raise InDoubt(f"{self._store.blobs.where(path)}: it comes and goes", hint="is the store mounted?")

    def _drop(self, record: Record) -> None:
        """The record is not there: deletes its segment, unless it was there and a newer writer has collected it."""
        with contextlib.suppress(ScarError):
            if record.seq == 0 or self._is_newest(record):
                self.discard(record)
        del self._doubts[record.shard]
