"""Compare copies in this host's memory with the store's records, by checksum: its own runs', and other hosts' replicas.

Only a copy that the store has in the same version can be compared. Newer ones are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.arena.owner import read_owner
from scarctl.arena.slot import Slot
from scarctl.recovery.memory import checksums, pieces
from scarctl.store import ShardState, Store, topology_epochs
from scarctl.util.arrays import Ids
from scarctl.util.document import Document

_NAMED = 1000


@dataclass(frozen=True, slots=True)
class MemoryCheck(Document):
    """One arena of this host, compared with the store."""

    folder: str
    id: str
    """Id of its run."""
    replica_of: str | None
    """Name of the host whose memory it is a copy of; None for this host's own."""
    step: int
    compared: int
    """Partitions whose checksum was compared with a record's."""
    newer: int
    """Partitions whose copy has no record in the store, or a record of another version."""
    moving: int
    """Partitions that have no copy, or were being copied."""
    damaged: int
    """Partitions whose bytes differ from those that were saved in the same version."""
    names: tuple[str, ...]
    """Names of the first thousand of them."""


def verify_memory(store: Store, arena_dir: str | None) -> list[MemoryCheck]:
    """Compare every arena of the store's runs that is on this host. Takes no lock: runs continue meanwhile.

    Raises Corruption for a record or an arena that cannot be read; AccessDenied, Unavailable.
    """
    views = [store.of_shard(shard) for shard in store.shards()] if topology_epochs(store) else [store]
    found = []
    for view in views:
        folder = arena_folder(arena_dir, view.run_id)
        arena = Arena.share(folder, run_id=view.run_id)
        if arena is not None:
            found.append(_check(arena, folder, view))
    return found


def _check(arena: Arena, folder: Path, view: Store) -> MemoryCheck:
    owner = read_owner(folder)
    layout, step = arena.layout, arena.head_step
    # Noted before the records are read: they have the checksums of copies that are durable now and stay unchanged.
    slot, saved, durable = arena.slot, arena.saved.copy(), arena.durable.copy()
    moments = slot.moments.copy()
    lifted = np.maximum(durable, arena.sealed)  # a seal found all durable copies unchanged
    has = moments > 0
    compared, damaged = 0, [np.empty(0, np.int64)]
    state = view.state(view.lane)
    if state.layout == layout:
        # The bytes of encoded copies are others than memory's.
        at = np.flatnonzero(state.saved & ~state.doubt & ~state.encoded)
        ids = state.ids[at]
        same = has[ids] & (saved[ids] == moments[ids])
        same &= (durable[ids] == state.version[at]) | (lifted[ids] == state.version[at])
        for looked, differs in _compare(slot, ids[same], state, at[same], moments):
            compared += looked
            damaged.append(differs)
    bad = np.concatenate(damaged)
    return MemoryCheck(
        str(folder),
        view.run_id,
        None if owner is None else owner.host,
        step,
        compared,
        int(has.sum()) - compared,
        int((~has).sum()),
        len(bad),
        tuple(layout.name(i) for i in bad[:_NAMED].tolist()),
    )


def _compare(slot: Slot, ids: Ids, state: ShardState, at: Ids, moments: Ids) -> Iterator[tuple[int, Ids]]:
    """Yield the number of partitions compared, and those that differ.

    at: places of `ids` in the state. moments: of every partition, noted before the state was read.
    """
    for g, part in pieces(slot.layout, ids):
        some = ids[part]
        sums = checksums(slot, g, some)
        # A partition that changed while it was read cannot be compared.
        still = slot.moments[some] == moments[some]
        differs = still & (sums != state.checksum[at[part]])
        yield int(still.sum()), some[differs]
