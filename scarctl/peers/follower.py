"""Follow a live arena by its generations, and send a peer the copies that it lacks: the sending side of a replica.

A copy is sent if it is intact here and differs from the peer's. So changes of one partition coalesce, and nothing is
queued. A new connection is not a special case: the peer reports the copies that it has.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.header import inode_in
from scarctl.arena.queue import HandOverQueue, Identity
from scarctl.arena.rows import read_rows
from scarctl.errors import Corruption, Fenced
from scarctl.peers.frames import MAX_BODY, Batch, Buffer, Kind, Mark, encode
from scarctl.state.version import NEVER
from scarctl.util.arrays import Ids, adjacent

log = logging.getLogger("scarctl")

Counters: TypeAlias = "tuple[int | str, ...]"

BATCH_BYTES = 8 << 20
"""Bytes of rows in a batch, if no partition is larger."""
_MOST_COPIES = 1 << 16
_TORN_SECONDS = 2.0
"""Seconds to wait for copies in progress before a round ends without a mark."""
_PAUSE = 0.005
_NO_IDS: Ids = np.empty(0, np.int64)
_NO_COPIES = (_NO_IDS, _NO_IDS, np.empty(0, np.uint64))


def most_body(arena: Arena) -> int:
    """Return the bytes of the largest batch of an arena."""
    largest = int(arena.layout.partition_bytes.max(initial=0))
    return max(BATCH_BYTES, largest) + _MOST_COPIES * 64


class Follower:
    """Tracks the copies of an arena that one peer has. It only reads the arena, whose run continues meanwhile."""

    def __init__(
        self, arena: Arena, *, most: int = BATCH_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with a peer that has nothing. most: bytes of rows in a batch."""
        self._arena = arena
        self._clock = clock
        self._queue = HandOverQueue(arena.folder)
        self._inode = inode_in(arena.folder)
        n = arena.layout.partitions
        self._generation = np.zeros(n, np.uint64)
        self._version = np.full(n, NEVER, np.int64)
        self._durable = np.full(n, NEVER, np.int64)
        self.acknowledged = self._version.copy()
        """Version of each copy that the peer certainly has: int64 of shape (partitions,), -1 for none."""
        self.confirmed: NDArray[np.uint64] = np.ones(n, np.uint64)
        """Generation of each copy that the peer certainly has: uint64 of shape (partitions,), 1 for none."""
        self._under_way: deque[tuple[Ids, Ids, NDArray[np.uint64]]] = deque()
        """Partitions, versions and generations in each frame that is not acknowledged yet."""
        self.rank: Ids | None = None
        """Place of each partition in the order of sending: int64 of shape (partitions,). None: ascending ids."""
        self._sent: dict[int, Identity] = {}
        """The hand-overs that the peer has, by number. Another process may put another one under the same number."""
        self._too_large: set[int] = set()
        self._buffer = np.empty(max(most, int(arena.layout.partition_bytes.max(initial=0))), np.uint8)
        self.marked_step = NEVER
        """Step of the newest mark sent."""
        self.marked_whole = ""
        """Name of the whole state in that mark, "" without one."""
        self._seen: Counters = ()
        """Counters when the newest round began."""
        self.marked: Counters = ()
        """Counters of the newest mark sent."""
        self.withheld = False
        """Whether a hand-over in the newest round was too large to send, so that the peer lacks it."""

    def has(self, have: Sequence[Ids]) -> None:
        """Note the copies that the peer has, from `Replica.have`. Raises Corruption for arrays of another length."""
        if len(have) != 3 or any(len(array) != len(self._version) for array in have):
            raise Corruption("a peer reports another number of copies than the layout has")
        generation, version, durable = have
        self._generation[:] = np.where(generation < 0, np.int64(1), generation).astype(np.uint64)
        self._version[:], self._durable[:] = version, durable
        self.confirmed = np.ones(
            len(version), np.uint64
        )  # cleared before the versions, which still describe another peer's copies
        self.acknowledged = np.where(generation < 0, np.int64(NEVER), version)
        self.confirmed = self._generation.copy()
        self._under_way.clear()
        self._sent.clear()

    def confirm(self) -> None:
        """Note that the peer has acknowledged the oldest frame of those that `round` has yielded since."""
        ids, version, generation = self._under_way.popleft()
        self.acknowledged[ids], self.confirmed[ids] = version, generation

    def lags(self) -> bool:
        """Return whether anything has changed since the newest round began. Cheap: counters only."""
        return self.counters() != self._seen

    def changed(self) -> NDArray[np.bool_]:
        """Return which copies differ from the peer's, or are in progress: bool of shape (partitions,)."""
        arena = self._arena
        found: NDArray[np.bool_] = arena.generation != self._generation
        found |= arena.version != self._version
        found |= arena.durable != self._durable
        return found

    def round(self) -> Iterator[list[Buffer]]:
        """Yield frames that bring the peer up to this moment or later: copies, hand-overs, and a mark.

        Each frame has to be sent before the next is taken. If no mark ends the round, some copies were in progress for
        too long. The frames already sent remain valid.

        Raises Fenced if another arena has taken the place, whose hand-overs then describe other copies.
        """
        arena = self._arena
        self._require_place()
        self._seen = self.counters()
        # The values read now describe the copies of this moment. They may be sent once the peer has these or later
        # copies.
        epoch, base, head = arena.epoch, arena.base_epoch, arena.head_step
        errors, sealed, moment, whole = arena.errors, arena.sealed, arena.moment, arena.whole
        handovers = self._handovers()
        left = np.flatnonzero(self.changed())
        until = self._clock() + _TORN_SECONDS
        while left.size:
            left = yield from self._copies(left)
            if left.size:
                if self._clock() > until:
                    self._seen = ()
                    return
                time.sleep(_PAUSE)
        self._require_place()
        for number, (identity, data) in handovers.items():
            if data is not None:
                self._under_way.append(_NO_COPIES)
                yield encode(Kind.HANDOVER, {"number": number}, data)
                self._sent[number] = identity
        # Copies equal those of the commit `whole` if none has begun since its name was read.
        same = bool((arena.generation == self._generation).all()) and arena.whole == whole
        named = whole if same and not self.withheld else ""
        self._under_way.append(_NO_COPIES)
        # Lines may belong to later records than the copies, but never to earlier ones.
        yield Mark(epoch, base, head, errors, sealed, moment, named, sorted(handovers), arena.line).frame()
        self._sent = {number: identity for number, identity in self._sent.items() if number in handovers}
        self.marked_step, self.marked_whole, self.marked = head, named, self._seen

    def counters(self) -> Counters:
        """Return counters, at least one of which changes with nearly every change of the arena."""
        arena = self._arena
        try:
            queued = os.stat(arena.folder).st_mtime_ns
        except FileNotFoundError:
            queued = 0
        return (arena.epoch, arena.head_step, arena.sealed, arena.moment, arena.errors, arena.whole, queued)

    def _require_place(self) -> None:
        """Raise Fenced unless the arena is in its place: a replica of the job's next start may have taken it."""
        if inode_in(self._arena.folder) != self._inode:
            raise Fenced(
                f"{self._arena.folder}: another arena has taken the place",
                hint="the run has continued elsewhere",
            )

    def _handovers(self) -> dict[int, tuple[Identity, bytes | None]]:
        """Return identities and files of waiting hand-overs by number; None for the files that the peer has.

        Hand-overs that are too large are left out; then `withheld` is True.
        """
        found: dict[int, tuple[Identity, bytes | None]] = {}
        self.withheld = False
        for number in self._queue.small():
            # Read before the file: a file that is replaced meanwhile is sent again in the next round.
            identity = self._queue.identity(number)
            if identity is not None and self._sent.get(number) == identity:
                found[number] = identity, None
                continue
            data = self._queue.file(number)
            if identity is None or data is None:
                continue  # the persister was faster
            if len(data) > MAX_BODY:
                if number not in self._too_large:
                    log.warning("hand-over %d of %d bytes is too large for a peer", number, len(data))
                self._too_large.add(number)
                self.withheld = True
                continue
            found[number] = identity, data
        return found

    def _copies(self, ids: Ids) -> Generator[list[Buffer], None, Ids]:
        """Yield frames with these copies, and return those in progress. Notes the copies that the peer then has."""
        missed = [_NO_IDS]
        for part in self._parts(ids):
            batches, under_way = self._read(part)
            missed.append(under_way)
            for kind, batch in batches:
                self._under_way.append((batch.ids, batch.version, batch.generation))
                yield encode(kind, {"count": len(batch.ids)}, *batch.parts())
                at = adjacent(batch.ids)
                self._generation[at], self._version[at] = batch.generation, batch.version
                self._durable[at] = batch.durable
        return np.sort(np.concatenate(missed))

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

    def _read(self, ids: Ids) -> tuple[list[tuple[Kind, Batch]], Ids]:
        """Return batches of copies that did not change meanwhile, with and without rows, and the other ids."""
        arena = self._arena
        before = arena.generation[ids]
        even = (before & np.uint64(1)) == 0
        missed, ids, before = ids[~even], ids[even], before[even]
        version, durable, distance = arena.version[ids], arena.durable[ids], arena.distance[ids]
        wanted = before != self._generation[ids]
        rows = ids[wanted]
        data = read_rows(arena, rows, self._buffer)
        # A copy counts as acknowledged, but no longer if it has changed since it was read.
        durable = np.where(durable == arena.durable[ids], durable, np.int64(NEVER))
        same = arena.generation[ids] == before
        missed = np.sort(np.concatenate([missed, ids[~same]]))
        if not same[wanted].all():
            # Rare: only complete rows are sent.
            whole = same[wanted]
            sizes = arena.layout.partition_bytes[rows]
            if not whole.any():
                data = data[:0]
            else:
                data = read_rows(arena, rows[whole], np.empty(int(sizes[whole].sum()), np.uint8))
                again = arena.generation[rows[whole]] == before[wanted][whole]
                if not again.all():
                    return [], np.sort(np.concatenate([missed, ids[same]]))
        found = []
        for kind, take, body in ((Kind.BATCH, same & wanted, data), (Kind.FIELDS, same & ~wanted, data[:0])):
            if take.any():
                batch = Batch(ids[take], before[take], version[take], durable[take], distance[take], body)
                found.append((kind, batch))
        return found, missed
