"""Share one store among members: processes that save alone, each to its own shard (docs/FORMAT.md, section 11).

Member k saves to shard k. The store's only topology has the number of members. The first member creates it exclusively,
and all later ones compare theirs with it. A member that starts again begins an epoch in its own log only.
"""

from __future__ import annotations

import contextlib
import hashlib

from scarctl.errors import Contention, SettingsConflict, UsageError
from scarctl.store.format import LOCK, canonical
from scarctl.store.lock import NoLock, StoreLock
from scarctl.store.store import Store
from scarctl.store.topology import Topology, create_topology, newest_topology, read_topology

EPOCH = 1
"""Epoch of the topology of members: it is the first of all epochs."""

MAX_MEMBERS = 100_000


def topology_of_members(count: int) -> Topology:
    """Return the topology of `count` members."""
    division = hashlib.sha256(canonical({"members": count})).hexdigest()
    return Topology(EPOCH, tuple(range(count)), division, independent=True)


def join_members(store: Store, count: int) -> None:
    """Make the store one of `count` members, or check that it is one.

    Raises SettingsConflict for another number of members; UsageError (kind "store-of-ranks", or
    "store-of-one-process") if others have saved to it; Contention if another process writes to the whole store;
    Corruption, AccessDenied, Unavailable.
    """
    found = newest_topology(store)
    if found is None:
        _create(store, count)
        found = read_topology(store, EPOCH)
    if not found.independent:
        raise UsageError(
            f"{store.where}: this store is written by {found.world} ranks, not by members",
            hint="omit member=, or use another store",
            kind="store-of-ranks",
        )
    if found.world != count:
        raise SettingsConflict(
            f"{store.where}: this store has {found.world} members, not {count}",
            hint=f"attach with member=(k, {found.world}); another number of members needs another store: "
            "`scarctl export` gives the saved state to it, see docs/members.md",
            kind="other-members",
        )


def _create(store: Store, count: int) -> None:
    # A single process holds this lock alone from its start on, so that it cannot begin here at the same moment.
    local = store.address.root is not None
    lock = StoreLock(store.root / LOCK, shared=True) if local else NoLock()
    try:
        # Another member may have begun since this one looked for a topology. Then that is there: logs come after it.
        if store.shards() and newest_topology(store) is None:
            raise UsageError(
                f"{store.where}: this store has a state that one process saved, or has lost its topology",
                hint="members need a store of their own; `scarctl export` gives the saved state to it",
                kind="store-of-one-process",
            )
        # Another member may be first. Then its topology counts.
        with contextlib.suppress(Contention):
            create_topology(store, topology_of_members(count))
    finally:
        lock.release()
