"""Check what a caller wants to commit, and publish records: the creation of a record is the commit.

Records whose outcome is unknown are settled.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.state.version import MAX_STEP, pack
from scarctl.store.backends.base import InDoubt
from scarctl.store.format import SETTINGS, record_path, segment_path
from scarctl.store.line import Companion, number_of
from scarctl.store.record import Record
from scarctl.store.segment import Tail, ascending
from scarctl.store.shard_state import ShardState
from scarctl.util.arrays import Ids

if TYPE_CHECKING:
    from scarctl.store.store import Store


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A record that may or may not be visible or durable, and the tail of its segment."""

    record: Record
    tail: Tail | None


class Publisher:
    """Publishes the records of one writer. `advance` is called once for each durable record."""

    def __init__(
        self, store: Store, advance: Callable[[Record, Tail | None], None], boundary: Callable[[int], int]
    ) -> None:
        """Publish to `store`. boundary: returns the boundary of a shard's log."""
        self._store = store
        self._advance = advance
        self._boundary = boundary
        self._doubts: dict[int, _Doubt] = {}
        self.lines: dict[int, int] = {}
        """Line of the newest published record, by shard."""
        self.companion: Companion | None = None

    def publish(self, record: Record, tail: Tail | None) -> None:
        """Create the record and apply it.

        Raises FileExistsError if another record has or had its number, InDoubt, and as `create_exclusive` does. If the
        record certainly does not exist, its segment is deleted.
        """
        # Keep the record until its outcome is known, even after an interrupt.
        self._doubts[record.shard] = _Doubt(record, tail)
        if self.companion is not None:
            self.companion.expect(record.shard, number_of(record.line))
        try:
            self._store.blobs.create_exclusive(record_path(record.shard, record.seq), [record.data])
        except InDoubt:
            raise
        except FileExistsError:
            # On an object store this may be the effect of a lost answer.
            there = self.there(record)
            if there is None or there.write_id != record.write_id:
                self._drop(record)
                raise
        except ScarError:
            self._drop(record)
            raise
        self._conclude(record, tail)

    def settle(self, shard: int) -> None:
        """Determine the outcome of the record that was in doubt. Raises InDoubt if that fails again."""
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
        # If another record has or had its number, the next commit is fenced.

    def is_settled(self, shard: int) -> bool:
        """Return whether the newest record of a shard is known."""
        return shard not in self._doubts

    def there(self, record: Record) -> Record | None:
        """Read the record with a record's number; None if a newer writer has collected it.

        Raises InDoubt if the whole store is unreachable.
        """
        try:
            return self._store.log(record.shard).record(record.seq)
        except FileNotFoundError:
            self._require_absent(record_path(record.shard, record.seq))
            return None

    def discard(self, record: Record) -> None:
        """Delete the segment of a record that does not exist."""
        if record.segment is not None:
            # On failure the segment stays as an orphan, which is harmless. The original error matters more.
            with contextlib.suppress(ScarError, OSError):
                self._store.blobs.delete(segment_path(record.shard, record.segment.name))

    def _conclude(self, record: Record, tail: Tail | None) -> None:
        """Apply a record that was created, unless a newer writer has collected an earlier record of its number.

        Raises FileExistsError in that case, and InDoubt if that cannot be decided now.
        """
        path = record_path(record.shard, record.seq)
        try:
            newest = self._is_newest(record)
        except ScarError as error:
            raise InDoubt(
                f"{self._store.blobs.where(path)}: written, but it is not known whether a newer writer has taken over "
                f"({error.message})",
                hint="acknowledged commits are safe; the next commit settles this one",
            ) from error
        if newest:
            self._advance(record, tail)
            self.lines[record.shard] = number_of(record.line)
            if self.companion is not None:
                self.companion.note(record.shard, self.lines[record.shard])
        del self._doubts[record.shard]
        if not newest:
            # The record is not deleted: if an answer was lost, the newer writer may have begun at this very record.
            raise FileExistsError(errno.EEXIST, "collected", path)

    def _is_newest(self, record: Record) -> bool:
        """Return whether no writer has collected the log up to the number of `record`, this writer's next one.

        Records are deleted in ascending order. So the record that moved the boundary last, or else the first one, is
        deleted before any of this writer's numbers becomes free. But another fenced writer, or a late request, may have
        created that number again. So the indexes are listed, too: a boundary's index exists before any deletion.
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
            if not self._store.blobs.has(first):  # the store may have become reachable meanwhile
                return False
        index = log.newest_index()
        if index < 0:
            self._require_store()
        if index <= record.seq:
            return True
        newest = log.newest()
        if newest is None:
            self._require_store()
        return newest is not None and newest.boundary <= record.seq

    def _require_store(self) -> None:
        """Raise Unavailable while the whole store is unreachable, like an unmounted folder.

        Then missing records were not collected.
        """
        if not self._store.blobs.has(SETTINGS):
            raise Unavailable(
                f"{self._store.where}: the store is missing",
                hint="is it mounted? Acknowledged commits are in it, and saving continues when it is back",
            )

    def _require_absent(self, path: str) -> None:
        """Raise InDoubt unless the store is reachable, and has no such record."""
        try:
            self._require_store()
            there = self._store.blobs.has(path)
        except ScarError as error:
            raise InDoubt(error.message, hint=error.hint) from error
        if there:
            raise InDoubt(
                f"{self._store.blobs.where(path)}: the file appears and disappears",
                hint="is the store mounted?",
            )

    def _drop(self, record: Record) -> None:
        """Delete the segment of a missing record, unless the record existed and a newer writer has collected it."""
        with contextlib.suppress(ScarError):
            if record.seq == 0 or self._is_newest(record):
                self.discard(record)
        del self._doubts[record.shard]


def checked_ids(
    state: ShardState, ids: Ids, step: int, floor: int, *, sealed: bool, extras: object | None
) -> Ids:
    """Return `ids` in ascending order, if they may be committed as of `step` to the shard with this state.

    floor: the step of the writer's newest commit to the shard.

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
        assert state.layout is not None, "an epoch record came first"
        state.require_sealable(at, state.layout)
    return unique


def checked_versions(
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
