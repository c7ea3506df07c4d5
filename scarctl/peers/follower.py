"""Follow a live arena by the moments of its copies, and send a peer those that it lacks: the sending side of a replica.

The slot that is sent is held meanwhile. So changes of one partition coalesce, and nothing is queued. A new connection
is not a special case: the peer reports the copies that it has.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.extras import extras_file
from scarctl.arena.header import inode_in
from scarctl.arena.rows import read_rows
from scarctl.arena.slot import Slot
from scarctl.arena.slots import LEAST_HOLD, MOST_HOLD, Hold
from scarctl.errors import Corruption, Fenced
from scarctl.peers.frames import MAX_BODY, Batch, Buffer, Kind, Mark, encode
from scarctl.state.version import NEVER
from scarctl.util.arrays import Ids, adjacent

log = logging.getLogger("scarctl")

Counters: TypeAlias = "tuple[int | str, ...]"

BATCH_BYTES = 8 << 20
"""Bytes of rows in a batch, if no partition is larger."""
_MOST_COPIES = 1 << 16


def most_body(arena: Arena) -> int:
    """Return the bytes of the largest batch of an arena."""
    largest = int(arena.layout.partition_bytes.max(initial=0))
    return max(BATCH_BYTES, largest) + _MOST_COPIES * 64


class Follower:
    """Tracks the copies of an arena that one peer has. It only reads the arena, whose run continues meanwhile."""

    def __init__(self, arena: Arena, *, most: int = BATCH_BYTES) -> None:
        """Begin with a peer that has nothing. most: bytes of rows in a batch."""
        self._arena = arena
        self._inode = inode_in(arena.folder)
        n = arena.layout.partitions
        self._moments: Ids = np.zeros(n, np.int64)
        self._saved: Ids = np.zeros(n, np.int64)
        self.confirmed: Ids = np.zeros(n, np.int64)
        """Moment of each copy that the peer certainly has, in a state that a mark has completed: 0 for none."""
        self._under_way: deque[Ids | None] = deque()
        """Moments of the copies that the peer has after each frame that is not acknowledged yet; None: as before."""
        self.rank: Ids | None = None
        """Place of each partition in the order of sending: int64 of shape (partitions,). None: ascending ids."""
        self._seconds = LEAST_HOLD
        self._extras_of = 0
        """Moment of the extras that the peer has."""
        self._marked_moment = 0
        """Moment of the newest mark sent to the peer."""
        self._too_large = 0
        self._buffer = np.empty(max(most, int(arena.layout.partition_bytes.max(initial=0))), np.uint8)
        self.marked_step = NEVER
        """Step of the newest mark sent."""
        self.marked_whole = ""
        """Name of the whole state in that mark, "" without one."""
        self._seen: Counters = ()
        """Counters when the newest round began."""
        self.marked: Counters = ()
        """Counters of the newest mark sent."""
        self.ended = False
        """Whether the newest round has sent everything that there was when it began."""
        self.withheld = False
        """Whether the extras in the newest round were too large to send, so that the peer lacks them."""

    def has(self, have: Sequence[Ids]) -> None:
        """Note the copies that the peer has, from `Replica.have`. Raises Corruption for arrays of another length."""
        if len(have) != 2 or any(len(array) != len(self._moments) for array in have):
            raise Corruption("a peer reports another number of copies than the layout has")
        self._moments[:], self._saved[:] = have
        self.confirmed = np.zeros_like(self._moments)
        self._under_way.clear()
        self._extras_of = self._marked_moment = 0

    def confirm(self) -> None:
        """Note that the peer has acknowledged the oldest frame of those that `round` has yielded since."""
        moments = self._under_way.popleft()
        if moments is not None:
            self.confirmed = moments

    def lags(self) -> bool:
        """Return whether anything has changed since the newest round began. Cheap: counters only."""
        return self.counters() != self._seen

    def changed(self, slot: Slot | None = None) -> NDArray[np.bool_]:
        """Return which copies differ from the peer's, in rows or in what the store has: bool (partitions,)."""
        slot = slot or self._arena.slot
        found: NDArray[np.bool_] = slot.differs(self._moments)
        found |= (self._arena.saved != self._saved) & (slot.moments > 0)
        return found

    def round(self) -> Iterator[list[Buffer]]:
        """Yield frames that bring the peer up to this moment or later: copies, extras, and a mark. Then it has `ended`.

        Each frame has to be sent before the next is taken. If no mark ends the round, training needed the slot. What
        was sent remains valid, and the next round continues with the newest state. If another reader holds an earlier
        state, the round sends that, once.

        In another order than by ids (`rank`), a mark follows each frame: the time may not be enough for all.

        Raises Fenced if another arena has taken the place, whose extras then describe other copies.
        """
        arena, needed = self._arena, self._arena.slot.moment
        self._require_place()
        self._seen, self.ended = self.counters(), False
        # The values read now describe the copies of this moment. They may be sent once the peer has these or later
        # copies.
        epoch, base, step, errors, sealed = (
            arena.epoch,
            arena.base_epoch,
            arena.head_step,
            arena.errors,
            arena.sealed,
        )
        with arena.held(self._seconds) as hold:
            slot = hold.slot
            moment, head, whole = slot.moment, slot.head, slot.whole
            kept = arena.kept if arena.kept <= moment else 0  # another sender may hold an older slot
            if moment < needed:
                self._seen = ()
                if moment == self._marked_moment:
                    return
            for frame in self._copies(hold, np.flatnonzero(self.changed(slot))):
                self._under_way.append(None)
                yield frame
                if self.rank is not None:
                    yield self._mark(
                        Mark(epoch, base, step, errors, sealed, moment, NEVER, 0, "", arena.line)
                    )
            extras = self._extras(slot) if moment != self._extras_of else None
            if not hold.end():
                self._seen, self._seconds = (), min(2 * self._seconds, MOST_HOLD)  # twice the time
                return
        self._seconds = LEAST_HOLD
        self._require_place()
        if extras is not None:
            self._under_way.append(None)
            yield encode(Kind.EXTRAS, {}, extras)
            self._extras_of = moment
        named = "" if self.withheld else whole
        # Lines may belong to later records than the copies, but never to earlier ones.
        yield self._mark(Mark(epoch, base, step, errors, sealed, moment, head, kept, named, arena.line))
        self._marked_moment = moment
        if moment < needed:
            return
        self.marked_step, self.marked_whole, self.marked, self.ended = step, named, self._seen, True

    def _mark(self, mark: Mark) -> list[Buffer]:
        self._under_way.append(self._moments.copy())
        return mark.frame()

    def counters(self) -> Counters:
        """Return counters, at least one of which changes with nearly every change of the arena."""
        arena = self._arena
        return (arena.epoch, arena.head_step, arena.sealed, arena.slot.moment, arena.errors, arena.kept)

    def _require_place(self) -> None:
        """Raise Fenced unless the arena is in its place: a replica of the job's next start may have taken it."""
        if inode_in(self._arena.folder) != self._inode:
            raise Fenced(
                f"{self._arena.folder}: another arena has taken the place",
                hint="the run has continued elsewhere",
            )

    def _extras(self, slot: Slot) -> bytes:
        """Return the file with the extras of a slot; empty without one, or if it is too large: then sets `withheld`."""
        data = extras_file(self._arena.folder, slot.number) or b""
        self.withheld = len(data) > MAX_BODY
        if not self.withheld:
            return data
        if not self._too_large:
            log.warning("extras of %d bytes are too large for a peer", len(data))
        self._too_large = len(data)
        return b""

    def _copies(self, hold: Hold, ids: Ids) -> Iterator[list[Buffer]]:
        """Yield frames with these copies, until the hold ends. Notes the copies that the peer then has."""
        for part in self._parts(ids):
            batches = self._read(hold.slot, part)
            if not hold.lasts():
                return
            for kind, batch in batches:
                at = adjacent(batch.ids)
                self._moments[at], self._saved[at] = batch.moments, batch.saved
                yield encode(kind, {"count": len(batch.ids)}, *batch.parts())

    def _parts(self, ids: Ids) -> Iterator[Ids]:
        """Yield the partitions in parts of at most a batch's bytes, but at least one partition.

        Ids ascend within a part. `rank` may change meanwhile: the remaining parts follow the new order.
        """
        rank = None
        while ids.size:
            if rank is not self.rank:
                rank = self.rank
                ids = np.sort(ids) if rank is None else ids[np.argsort(rank[ids], kind="stable")]
            ends = np.cumsum(self._arena.layout.partition_bytes[ids])
            first = 0
            while first < ids.size and rank is self.rank:
                before = int(ends[first - 1]) if first else 0
                last = int(np.searchsorted(ends, before + self._buffer.size, side="right"))
                last = min(max(last, first + 1), first + _MOST_COPIES)
                yield ids[first:last] if rank is None else np.sort(ids[first:last])
                first = last
            ids = ids[first:]

    def _read(self, slot: Slot, ids: Ids) -> list[tuple[Kind, Batch]]:
        """Return batches of these copies, with and without rows."""
        arena = self._arena
        wanted = slot.moments[ids] != self._moments[ids]
        data = read_rows(slot, ids[wanted], self._buffer)
        found = []
        for kind, take, body in ((Kind.BATCH, wanted, data), (Kind.FIELDS, ~wanted, data[:0])):
            some = ids[take]
            if some.size:
                batch = Batch(
                    some,
                    slot.moments[some],
                    slot.version[some],
                    arena.durable[some],
                    arena.saved[some],
                    arena.distance[some],
                    body,
                )
                found.append((kind, batch))
        return found
