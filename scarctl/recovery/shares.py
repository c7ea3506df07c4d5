"""Open the state in a store as shares: one for each rank that owns part of it, or one for a single process.

Recovery and export plan each share separately (`scarctl.recovery.plan`), and combine the shares
(`scarctl.recovery.shared_plan`). So a single process is handled like one rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, NoIntactCopy, ScarError, UsageError
from scarctl.recovery.lost import Lost, find_lost, parse_lost, refuse_unmatched
from scarctl.recovery.plan import check_snapshot
from scarctl.recovery.reshard import Parts, find_parts, topology_of
from scarctl.state.layout import Layout
from scarctl.store import (
    SealedSet,
    ShardState,
    Snapshot,
    Store,
    newest_topology,
    read_snapshot,
    sealed_sets,
)
from scarctl.store.backing import backed_shards
from scarctl.store.members import EPOCH, name_among
from scarctl.store.snapshot import lost_seals
from scarctl.store.topology import Topology, read_topology
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a saved state; all of it if a single process saves."""

    rank: int | None
    """Rank; None for a single process."""
    store: Store
    """The writer's view of the store."""
    layout: Layout
    shard_of: NDArray[np.int32]
    """Shard of every partition: shape (layout.partitions,)."""
    state: ShardState
    """State of the writer's lane; empty if it cannot be read."""
    unreadable: Corruption | None = None
    """Why the state cannot be read. Partitions of other shares can still be restored."""
    shown: Layout | None = None
    """A member's layout with the names that its groups have in the state of all members; None if they are the same."""

    def require(self, ids: Ids) -> None:
        """Raise Corruption if there are partitions `ids`, and their log cannot be read."""
        if ids.size and self.unreadable is not None:
            raise self.unreadable


@dataclass(frozen=True, slots=True)
class SharedState:
    """A whole state in shares. Ranks that own nothing have no share.

    Members have separate states, so the whole may be incomplete: see `absent`.
    """

    store: Store
    shares: tuple[Share, ...]
    states: Mapping[int, ShardState]
    """States by shard, including those of ranks that own nothing."""
    topology: Topology | None = None
    """Topology of the ranks or members that saved the state; None for a single process."""
    absent: Mapping[int, ScarError] = field(default_factory=dict)
    """Members without a share, each with the error for its partitions: they saved nothing, or it cannot be read."""
    hidden: tuple[str, ...] = ()
    """Damage that may hide a newer whole state of other ranks: the reasons, for display."""

    @property
    def of_members(self) -> bool:
        """Whether members saved this state."""
        return self.topology is not None and self.topology.independent

    @property
    def layouts(self) -> list[Layout]:
        """Layouts of all shares, with the names of the whole state."""
        return [share.layout if share.shown is None else share.shown for share in self.shares]

    @property
    def names(self) -> dict[str, None]:
        """Names of all groups, in order."""
        return {group.name: None for layout in self.layouts for group in layout.groups}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return sum(layout.nbytes for layout in self.layouts)

    @property
    def head(self) -> int:
        """Newest saved step; -1 if nothing was saved."""
        return max((state.step for state in self.states.values()), default=-1)

    def head_of(self, share: Share) -> int:
        """Return the newest saved step of the state that a share is part of. Members have no common step."""
        return share.state.step if self.of_members else self.head

    @property
    def lost_seals(self) -> tuple[str, ...]:
        """The damage that may hide newer sealed states than those of `sealed`. Raises Corruption as `sealed` does."""
        return self.hidden + lost_seals(self.states.values(), self.sealed())

    def everything(self) -> list[Ids]:
        """Return the ids of all partitions of every share. Raises NoIntactCopy, Corruption for an absent member."""
        for error in self.absent.values():
            raise error
        return [np.arange(layout.partitions, dtype=np.int64) for layout in self.layouts]

    def again(self) -> SharedState:
        """Read the states from the store again. Raises LayoutMismatch, Corruption, Unavailable."""
        shares = tuple(
            replace(_share(of.rank, of.store, of.layout, of.shard_of), shown=of.shown) for of in self.shares
        )
        states = _states(shares)
        others = self.store.states((shard for shard in self.states if shard not in states), around=True)
        return replace(self, shares=shares, states=others | states)

    def lost(self, lost: Lost) -> list[Ids]:
        """Return the ids (int64, ascending) of every share's partitions that `lost` names (`scarctl.recovery.lost`).

        Raises UsageError with the unknown name and the known ones.
        """
        names, topology = self.names, self.topology
        if topology is None:
            items = parse_lost(lost, names, range(self.store.settings.shards))
        else:
            items = parse_lost(lost, names, topology.shards, topology.world, topology.noun)
        for number, error in self.absent.items():
            shard = number if topology is None else topology.shards[number]
            if {("all", ""), ("rank", number), ("shard", shard)} & set(items):
                raise error
        pairs = zip(self.shares, self.layouts, strict=True)
        found = [find_lost(items, layout, share.shard_of, share.rank or 0) for share, layout in pairs]
        refuse_unmatched([unmatched for _, unmatched in found], names)
        ids = [mine for mine, _ in found]
        if topology is not None and not any(mine.size for mine in ids):
            raise UsageError(
                f"the lost {topology.noun}s or names have no partitions",
                hint=f"nothing is lost: other {topology.noun}s own the partitions of these",
            )
        return ids

    def only(self, ids: Sequence[Ids]) -> tuple[SharedState, list[Ids]]:
        """Return the state of those members that have partitions in `ids` (by share), and these ids.

        A member's state is complete without the others, so it is restored without them.
        """
        mine = [(share, own) for share, own in zip(self.shares, ids, strict=True) if own.size]
        shares = tuple(share for share, _ in mine)
        return replace(self, shares=shares, states=_states(shares)), [own for _, own in mine]

    def sealed(self) -> list[SealedSet]:
        """Return the states that all shares have sealed, newest first. Raises Corruption if one cannot be read."""
        for share in self.shares:
            if share.unreadable is not None:
                raise share.unreadable
        return sealed_sets(self.states.values())


def open_shares(store: Store, snapshot: Snapshot | None = None) -> SharedState:
    """Open the newest state of a store, or a snapshot of it.

    If ranks save to the store, this is the newest whole state. Logs a warning if the newest ranks did not save it. If
    members do, these are the newest states of all of them, and a warning names the members without a state.

    Raises NoIntactCopy (kind "nothing-saved") if the store has no whole state; LayoutMismatch if a single process's
    snapshot has another layout; Corruption, Unavailable.
    """
    newest = newest_topology(store)
    if newest is None:
        return _of_one_process(store, snapshot)
    if newest.independent:
        return _of_members(store, newest, snapshot)
    try:
        parts = find_parts(store, snapshot=snapshot, around=True)
    except Corruption as error:
        if snapshot is None:
            raise
        raise damaged_snapshot(snapshot.name, error.message) from error
    if parts is None:
        raise NoIntactCopy(
            f"{store.where}: no ranks have saved a whole state in this store yet",
            hint="list the saved parts with `scarctl inspect`",
            kind="nothing-saved",
        )
    if parts.passed_over:
        log.warning("%s", fallback_note(parts))
    hidden = tuple(damage.reason for damage in parts.hidden)
    return SharedState(store, tuple(_shares(parts)), parts.states, parts.topology, hidden=hidden)


def named_snapshot(store: Store, name: str | None) -> Snapshot | None:
    """Return a snapshot by its name; None for None. Raises UsageError, Corruption."""
    return None if name is None else read_snapshot(store, name)


def damaged_snapshot(name: str, reason: str) -> NoIntactCopy:
    """Return the error for a snapshot that cannot be restored."""
    return NoIntactCopy(
        f"snapshot {name!r} is damaged: {reason}",
        hint="nothing was changed; list the damage with `scarctl verify`",
        kind="no-sealed-state",
    )


def fallback_note(parts: Parts) -> str:
    """Return a sentence that names the newer topologies without a whole state."""
    newest = read_topology(parts.store, parts.passed_over[0])
    older = (
        "one process"
        if parts.topology is None
        else f"the {parts.topology.world} ranks of epoch {parts.topology.epoch}"
    )
    damage = f", or it is damaged ({parts.hidden[0].reason})" if parts.hidden else ""
    return (
        f"{parts.store.url}: the {newest.world} ranks of epoch {newest.epoch} have not saved a whole state "
        f"yet{damage}: this is the state of {older}"
    )


def _of_one_process(store: Store, snapshot: Snapshot | None) -> SharedState:
    layout = store.current_layout(around=True)
    if layout is None:
        raise _nothing_saved(f"{store.where}: the store is still empty")
    shard_of = backed_shards(store, layout)
    if snapshot is not None:
        check_snapshot(store, snapshot, layout)
    shares = (_share(None, store, layout, shard_of),)
    return SharedState(store, shares, _states(shares))


def as_member(layout: Layout, number: int) -> Layout:
    """Return a member's layout with the names that its groups have in the state of all members: see `name_among`."""
    return Layout(
        [replace(group, name=name_among(group, number)) for group in layout.groups], layout.optimizer
    )


def _of_members(store: Store, topology: Topology, snapshot: Snapshot | None) -> SharedState:
    shares, absent = [], dict[int, ScarError]()
    if snapshot is not None:
        topology = topology_of(store, snapshot.seqs) or topology
    for number, shard in enumerate(topology.shards):
        if snapshot is not None and shard not in snapshot.seqs:
            continue
        view = store.of_shard(shard)
        try:
            layout = view.current_layout(around=True)
            if layout is None:
                raise _nothing_saved(f"{store.where}: {nothing_yet(topology, number)}")
            share = _share(number, view, layout, backed_shards(view, layout))
        except (Corruption, NoIntactCopy) as error:
            absent[number] = error
            log.warning("%s. It is left out", error.message)
            continue
        shares.append(replace(share, shown=as_member(layout, number)))
    if not shares:
        raise next(iter(absent.values()))
    return SharedState(store, tuple(shares), _states(shares), topology, absent)


def nothing_yet(topology: Topology, number: int) -> str:
    """Describe a member that has no record yet."""
    if topology.epoch == EPOCH:
        return f"member {number} has saved nothing yet"
    return f"member {number} of {topology.world} has not started yet, and the previous members still have its rows"


def _nothing_saved(message: str) -> NoIntactCopy:
    return NoIntactCopy(message, hint="save a checkpoint first", kind="nothing-saved")


def _shares(parts: Parts) -> Iterator[Share]:
    store = parts.store
    if parts.topology is None:
        state = parts.states[store.lane]
        assert state.layout is not None, "a whole state has a layout"
        yield Share(None, store, state.layout, store.shard_of(state.layout), state)
        return
    for rank, shard in enumerate(parts.topology.shards):
        found = parts.states.get(shard)
        if found is not None and found.layout is not None and found.layout.partitions:
            view = store.of_shard(shard)
            yield Share(rank, view, found.layout, view.shard_of(found.layout), found)


def _share(rank: int | None, store: Store, layout: Layout, shard_of: NDArray[np.int32]) -> Share:
    """Make a share from the current state of a writer's lane, read around damaged records."""
    try:
        return Share(rank, store, layout, shard_of, store.state(store.lane, layout, around=True))
    except Corruption as error:
        return Share(rank, store, layout, shard_of, ShardState(store.lane), error)


def _states(shares: Iterable[Share]) -> dict[int, ShardState]:
    """Return the readable states of shares, by shard."""
    return {share.state.shard: share.state for share in shares if share.unreadable is None}
