"""Share one store among members: processes that save alone, each to its own lane (docs/FORMAT.md, section 11).

The newest topology has the number of members, and the shard of each. The first member creates it exclusively, and all
later ones compare theirs with it. A member that starts again claims a term in its own lane only.

A new number of members gets a new topology, with new shards. Its members take over the content of the older ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from scarctl.errors import Contention, SettingsConflict, UsageError
from scarctl.state.group import Group
from scarctl.store.format import LOCK, MAX_SHARD, canonical
from scarctl.store.lock import NoLock, StoreLock
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store
from scarctl.store.topology import Topology, create_topology, newest_topology, read_topology, topology_epochs
from scarctl.store.writer import open_writer

EPOCH = 1
"""Number of the first topology of members."""

MAX_MEMBERS = 100_000

PATIENCE = 5.0
"""Seconds to wait for a lock that another member may hold briefly, to fence the same shard."""
_POLL = 0.02


def topology_of_members(count: int, epoch: int = EPOCH, first: int = 0) -> Topology:
    """Return the topology of `count` members. first: the shard of member 0."""
    division = hashlib.sha256(canonical({"members": count})).hexdigest()
    return Topology(epoch, tuple(range(first, first + count)), division, independent=True)


def join_members(
    store: Store,
    count: int,
    replaces: int | None = None,
    after: int | None = None,
    *,
    before: Callable[[Topology], object] = lambda _: None,
) -> Topology:
    """Make the store one of `count` members, or check that it is one, and return its topology.

    replaces, after: see `scarctl.Member`. before: called with the topology of these members before theirs is
    replaced. It may raise, and then nothing was changed.

    Raises SettingsConflict for another number of members; UsageError (kind "store-of-ranks", or
    "store-of-one-process") if others have saved to it, or if no shard is left for so many members; Contention if
    another process writes to the whole store, or if a member that is to be replaced still runs; Corruption,
    AccessDenied, Unavailable.
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
    had = found.world != count and any(one.world == count for one in earlier(store, found))
    named = after == found.epoch if had or after is not None else True
    if found.world != count and found.world == replaces and named:
        _replace(store, found, count, before)
        found = newest_topology(store)
        assert found is not None, "a topology was created"
    if found.world != count:
        # A process that was started for the previous members may still have their arguments.
        since = f" since epoch {found.epoch}; it had {count} before" if had else ""
        asked = f"replaces={found.world}" + (f", after={found.epoch}" if had or after is not None else "")
        raise SettingsConflict(
            f"{store.where}: this store has {found.world} members, not {count}{since}",
            hint=f"attach with member=(k, {found.world}). To change the number, end these members and start others "
            f"with scarctl.Member(k, {count}, divided=..., {asked}): see docs/members.md",
            kind="other-members",
        )
    return found


def _create(store: Store, count: int) -> None:
    # A single process holds this lock exclusively from its start, so it cannot begin here at the same moment.
    local = store.address.root is not None
    lock = StoreLock(store.root / LOCK, shared=True) if local else NoLock()
    try:
        # Another member may have begun since this one looked for a topology. Then a topology exists: it precedes the
        # logs.
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


# -- another number of members -----------------------------------------------------------------------------------


def _replace(store: Store, found: Topology, count: int, before: Callable[[Topology], object]) -> None:
    """Create the topology of `count` members, unless another member is first. Raises Contention if one of `found` runs.

    On a remote store a member that still runs cannot be detected. It is fenced when its shard is taken over.
    """
    first = found.shards[-1] + 1
    if first + count - 1 > MAX_SHARD:
        raise UsageError(
            f"{store.where}: the shards are used up: {MAX_SHARD - first + 1} are left for {count} new members",
            hint="`scarctl export` gives the saved state to a new store; nothing was changed",
        )
    before(found)
    for number, shard in enumerate(found.shards):
        view = store.of_shard(shard)
        try:
            patiently(lambda view=view: view.take_lock().release())  # type: ignore[misc]
        except Contention as error:
            raise Contention(
                f"{store.where}: member {number} of {found.world} still runs: {error.message}",
                hint="end it first: nothing was changed",
            ) from error
    # Epoch and shards follow from the replaced topology. So of several simultaneous creations one succeeds.
    with contextlib.suppress(Contention):
        create_topology(store, topology_of_members(count, found.epoch + 1, first))


def earlier(store: Store, topology: Topology) -> list[Topology]:
    """Return the topologies of members before this one, newest first."""
    epochs = [epoch for epoch in topology_epochs(store) if epoch < topology.epoch]
    return [read_topology(store, epoch) for epoch in reversed(epochs)]


def fence(store: Store, shard: int) -> None:
    """Claim a term in a lane, so that its member commits nothing more.

    A lane without a log needs none: see `scarctl.store.topology.require_current`. Raises Contention if the member
    runs on this host; Corruption, AccessDenied, Unavailable.
    """
    view = store.of_shard(shard)
    layout = view.current_layout()
    if layout is not None:
        patiently(lambda: open_writer(view, layout=layout).close())


def patiently(call: Callable[[], object], seconds: Callable[[], float] = lambda: PATIENCE) -> None:
    """Repeat a call while it raises Contention: other members take the same locks for a moment.

    seconds: returns the time limit since the first call. It is called after each Contention.
    """
    began = time.monotonic()
    while True:
        try:
            call()
            return
        except Contention:
            if time.monotonic() - began > seconds():
                raise
        time.sleep(_POLL)


def taken_over(store: Store, topology: Topology, states: Mapping[int, ShardState]) -> set[int]:
    """Return the shards of earlier members whose rows are all in sealed states of these members.

    states: states of all shards.
    """
    mine = [states.get(shard) for shard in topology.shards]
    if any(state is None or state.layout is None or not state.sealed for state in mine):
        return set()
    rows: dict[str, list[tuple[int, int]]] = {}
    for number, state in enumerate(mine):
        if state is not None and state.layout is not None:
            for group in state.layout.groups:
                rows.setdefault(name_among(group, number), []).append(rows_of(group))
    found = set()
    for old in earlier(store, topology):
        for number, shard in enumerate(old.shards):
            layout = states[shard].layout if shard in states else None
            if layout is not None and all(
                covered(rows_of(group), rows.get(name_among(group, number), ())) for group in layout.groups
            ):
                found.add(shard)
    return found


def name_among(group: Group, number: int) -> str:
    """Return the name that a group of a member has in the state of all members.

    A part of a divided tensor has the tensor's name. Other groups are the member's own: `<name>@<number>`.
    """
    return group.name if group.place is not None else f"{group.name}@{number}"


def rows_of(group: Group) -> tuple[int, int]:
    """Return the first row and last row + 1 of a group in its whole tensor."""
    return group.first_row, group.first_row + group.rows


def covered(wanted: tuple[int, int], there: Sequence[tuple[int, int]]) -> bool:
    """Return whether several intervals of rows cover one."""
    at, stop = wanted
    for start, end in sorted(there):
        if start > at:
            break
        at = max(at, end)
    return at >= stop
