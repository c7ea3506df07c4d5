"""Compare copies in memory with the checksums that the store has of the same copies.

Memory has no checksums of its own, so a copy that is newer than the store's cannot be compared. Nor can one that the
store has encoded: the checksum is that of other bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.slot import Slot
from scarctl.state.layout import Layout, rows_of
from scarctl.state.version import step_of
from scarctl.store import ShardState
from scarctl.store.segment import by_group, partition_checksums
from scarctl.util.arrays import Ids
from scarctl.util.worker import run_all

_PIECE = 4 << 20
_THREADS = min(4, os.cpu_count() or 1)
_NAMED = 5


def comparable(arena: Arena, slot: Slot, ids: Ids, state: ShardState) -> tuple[Ids, Ids]:
    """Return the `ids` whose copy in the store is the same as in a slot of memory, and their indices in `state`."""
    at = state.find(ids)
    ids, at = ids[at >= 0], at[at >= 0]
    known = state.saved[at] & ~state.doubt[at] & ~state.encoded[at] & slot.intact()[ids]
    if not (slot.whole and slot.whole == state.whole):
        # Epochs may differ: a process that takes over counts all copies as those of its own epoch.
        durable, stored = arena.durable[ids], step_of(state.version[at])
        # A seal lifts the versions of unchanged copies in the store. A newer commit may not be noted yet.
        same = (step_of(durable) == stored) | (step_of(np.maximum(durable, arena.sealed)) == stored)
        known &= same & (arena.saved[ids] == slot.moments[ids])
    return ids[known], at[known]


def differing(arena: Arena, slot: Slot, ids: Ids, state: ShardState) -> Ids:
    """Return the `ids` (ascending) whose copies in a slot differ in bytes from the same copies in the store.

    Reads all bytes, in several threads. They must not change meanwhile.
    """
    ids, at = comparable(arena, slot, ids, state)
    wrong = np.zeros(ids.size, dtype=bool)

    def compare(piece: tuple[int, slice]) -> None:
        g, part = piece
        wrong[part] = checksums(slot, g, ids[part]) != state.checksum[at[part]]

    run_all(compare, pieces(arena.layout, ids), _THREADS)
    return ids[wrong]


def pieces(layout: Layout, ids: Ids) -> Iterator[tuple[int, slice]]:
    """Yield groups, and slices of `ids` (ascending) with their partitions of a few MiB together."""
    for g, first, last in by_group(layout, ids):
        group = layout.groups[g]
        step = max(1, _PIECE // max(1, group.rows_per_partition * group.row_bytes))
        for start in range(first, last, step):
            yield g, slice(start, min(start + step, last))


def checksums(slot: Slot, g: int, ids: Ids) -> NDArray[np.uint64]:
    """Return the checksums of the copies of `ids` (ascending) of group `g` in a slot: uint64 of the shape of `ids`."""
    group, rows = slot.layout.groups[g], rows_of(slot.layout, g, ids)
    tensors = [np.ascontiguousarray(slot.rows(g, t)[rows]).reshape(-1) for t in range(len(group.tensors))]
    return partition_checksums(group, ids.size, tensors)


def fault(arena: Arena, ids: Ids) -> str:
    """Describe the copies in memory that differ from the store's."""
    host = arena.replica_of
    where = "this host's memory" if host is None else f"this host's replica of the memory of {host}"
    names = ", ".join(arena.layout.name(i) for i in ids[:_NAMED].tolist())
    more = f" and {ids.size - _NAMED} more" if ids.size > _NAMED else ""
    return (
        f"{names}{more}: the bytes in {where} are not those that were saved, by their checksums. The store's copies "
        "are used instead; have this host's memory tested"
    )
