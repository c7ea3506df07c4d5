"""Making hand-overs durable: arena to segments and records, then the acknowledgement in the arena."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.daemon.handover import HandOver, HandOverQueue
from scarctl.errors import Overwritten
from scarctl.store import StoreWriter
from scarctl.version import step_of

log = logging.getLogger("scarctl")
Ids = NDArray[np.int64]

_ATTEMPTS = 8
"""How often a segment may be spoiled by newer copies before the hand-over is put off."""


class Persister:
    """Commits hand-overs, shard by shard. Not for several threads at once."""

    def __init__(self, arena: Arena, writer: StoreWriter, shard_of: NDArray[np.int32]) -> None:
        self._arena = arena
        self._writer = writer
        self._members = {shard: np.flatnonzero(shard_of == shard) for shard in np.unique(shard_of).tolist()}
        self._shard_of = shard_of

    def persist(self, handover: HandOver) -> int:
        """Make a hand-over durable and acknowledge it in the arena; returns the bytes of state written.

        May be called again after a failure: what is durable by then is not written again. Partitions that have a newer
        copy by now are left to the hand-over of that copy. Raises what `StoreWriter.commit` raises.
        """
        arena, version = self._arena, handover.version
        ids = handover.ids[arena.version[handover.ids] == version]
        ids = ids[arena.durable[ids] != version]
        shard_of = self._shard_of[ids]
        extras, written = handover.extras, 0
        # A sealed hand-over says something about every shard, also where nothing changed.
        for shard, members in self._members.items():
            mine = ids[shard_of == shard]
            if handover.sealed:
                if (arena.durable[members] == version).all():
                    continue  # committed before an earlier attempt failed at another shard
            elif not mine.size:
                continue
            done, sealed = self._commit(shard, mine, handover, extras)
            arena.acknowledge(members if sealed else done, version)
            written += int(arena.layout.partition_bytes[done].sum())
            extras = None  # they belong to the whole process: once is enough
        return written

    def _commit(self, shard: int, ids: Ids, handover: HandOver, extras: Any) -> tuple[Ids, bool]:
        """Commit what of `ids` has no newer copy. Returns which that were, and whether the shard is sealed now."""
        arena = self._arena
        for _ in range(_ATTEMPTS):
            # A copy that is newer, or under way, comes with its own hand-over.
            still = (arena.version[ids] == handover.version) & arena.intact()[ids]
            sealed = handover.sealed and bool(still.all())
            ids = ids[still]
            if not ids.size and not sealed and extras is None:
                return ids, False
            before = arena.generation[ids].copy()
            try:
                self._writer.commit(
                    shard,
                    ids,
                    arena.source,
                    step=step_of(handover.version),
                    sealed=sealed,
                    extras=extras,
                    verify_source=lambda ids=ids, before=before: bool(
                        (arena.generation[ids] == before).all()
                    ),
                )
            except Overwritten:
                continue
            return ids, sealed
        raise Overwritten(
            f"shard {shard}: copies keep changing while they are written", hint="it is tried again"
        )


def adopt_orphans(arena: Arena, queue: HandOverQueue) -> int:
    """Queue copies that are complete but were never handed over, because their process died or failed in between.

    Returns how many partitions those are. Their extras are lost: they come back with the newest older ones.
    """
    orphans = arena.pending() & arena.intact()
    for handover in queue.pending():
        orphans[handover.ids[arena.version[handover.ids] == handover.version]] = False
    ids = np.flatnonzero(orphans)
    versions = arena.version[ids]
    for version in np.unique(versions).tolist():
        queue.put(version=version, ids=ids[versions == version], sealed=False, extras=None)
    return int(ids.size)
