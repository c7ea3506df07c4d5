"""List the lanes of the processes that save to a store: one lane each (docs/FORMAT.md, sections 10 and 11).

Every rank saves its share of the state to its own lane, with its own log, lock and terms. A small file per start of the
job, `topology/<number>.json`, has the lane of every rank. A job that restarts with the same division keeps its lanes.
With another division it gets new ones. In the code, lanes are called shards.

Members are independent processes: their topologies are created by `scarctl.store.members`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from scarctl.errors import Contention, Corruption, Fenced, UsageError
from scarctl.state.version import MAX_EPOCH
from scarctl.store.format import (
    FORMAT,
    MAX_FLAT,
    MAX_SHARD,
    MAX_SHARDS,
    MAX_TOPOLOGY,
    TOPOLOGIES,
    Fields,
    corrupt,
    dump_json,
    epoch_of_topology,
    load_json,
    topology_path,
)
from scarctl.store.snapshot import SealedSet, sealed_sets
from scarctl.store.term import now, who
from scarctl.util.text import counted

if TYPE_CHECKING:
    from scarctl.store.shard_state import ShardState
    from scarctl.store.store import Store

_HEAL = (
    "data are not affected; restore the file from a backup. If the job had the same ranks at its previous start, this "
    "file may be deleted: the previous topology names the same shards. For members whose number never changed, "
    "the file of another store with as many members can be used"
)


@dataclass(frozen=True)
class Topology:
    """The lanes of a job's ranks, from one start on."""

    epoch: int
    """The number of this start, from 1. A lane's terms have numbers of their own."""
    shards: tuple[int, ...]
    """Lane of every rank."""
    division: str
    """SHA-256 of the division of the state among the ranks: 64 hex digits."""
    created: str = field(default_factory=now)
    writer: str = field(default_factory=who)
    independent: bool = False
    """Whether the processes are members: each starts alone, and shares no state with another."""

    @property
    def world(self) -> int:
        """Number of ranks, or of members."""
        return len(self.shards)

    @property
    def noun(self) -> str:
        """The word for one of the processes."""
        return "member" if self.independent else "rank"

    @property
    def data(self) -> bytes:
        """The file's content."""
        fields = asdict(self)
        if not self.independent:
            del fields["independent"]
        return dump_json({"format": FORMAT, "kind": "topology", **fields})

    @staticmethod
    def parse(data: bytes, what: object, *, epoch: int) -> Topology:
        """Parse a topology from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        f = Fields(load_json(data, what, containers=MAX_FLAT, values=MAX_SHARDS), what)
        if f.text("kind") != "topology" or f.integer("epoch", 1, MAX_EPOCH) != epoch:
            raise corrupt(what, "it is the topology of another epoch")
        shards = f.raw("shards")
        if (
            not isinstance(shards, list)
            or not shards
            or not all(type(shard) is int and 0 <= shard <= MAX_SHARD for shard in shards)
            or len(set(shards)) != len(shards)
        ):
            raise corrupt(what, "its shards are malformed")
        independent = f.raw("independent") is not None and f.flag("independent")
        # The first members have the first shards, and later members have the shards after their predecessors'.
        if independent and (
            shards != list(range(shards[0], shards[0] + len(shards))) or (epoch == 1) != (shards[0] == 0)
        ):
            raise corrupt(what, "it is not a topology of members")
        division = f.hex("division", 64)
        return Topology(epoch, tuple(shards), division, f.text("created"), f.text("writer"), independent)


def topology_epochs(store: Store) -> list[int]:
    """Return the epochs of all topologies, ascending."""
    found = (epoch_of_topology(name) for name in store.blobs.names(TOPOLOGIES))
    return sorted(epoch for epoch in found if epoch is not None)


def read_topology(store: Store, epoch: int) -> Topology:
    """Return one topology. Raises Corruption if it is missing or damaged."""
    path = topology_path(epoch)
    what = store.blobs.where(path)
    try:
        return Topology.parse(store.blobs.read(path, MAX_TOPOLOGY), what, epoch=epoch)
    except FileNotFoundError:
        raise corrupt(what, "this topology is missing") from None
    except Corruption as error:
        raise Corruption(error.message, hint=_HEAL) from error


def refuse_ranks(store: Store) -> None:
    """Raise UsageError if several ranks or members save to the store, each to its own shard.

    Its kind is "store-of-ranks" or "store-of-members".
    """
    if store.part is not None:
        return
    refuse_members(store)
    newest = newest_topology(store)
    if newest is not None:
        raise UsageError(
            f"{store.where}: this store is written by {counted(newest.world, 'rank')}",
            hint="one process cannot save to it: start the job with its ranks, or use another store",
            kind="store-of-ranks",
        )


def refuse_members(store: Store) -> None:
    """Raise UsageError (kind "store-of-members") if members save to the store: ranks and a single process may not."""
    newest = newest_topology(store)
    if newest is not None and newest.independent:
        raise UsageError(
            f"{store.where}: this store is written by {newest.world} members, each with a shard of its own",
            hint=f"attach with member=(k, {newest.world}), or use another store",
            kind="store-of-members",
        )


def require_current(store: Store) -> None:
    """Raise Fenced if the store is the view of a member whose shard other members have taken over.

    A writer asks after its first record. Members that take the lane over create their topology, then claim a term in
    it, then read it. So this writer either finds their topology, or is fenced by their term.
    """
    if store.part is None or not store.part.current:
        return
    newest = newest_topology(store)
    if newest is None or store.part.shard not in newest.shards:
        count = 0 if newest is None else newest.world
        raise Fenced(
            f"{store.where}: {counted(count, 'member')} have taken over this store and this member's state",
            hint="stop this process; its earlier commits are safe",
        )


def newest_topology(store: Store) -> Topology | None:
    """Return the current topology; None for a store of a single process."""
    epochs = topology_epochs(store)
    return read_topology(store, epochs[-1]) if epochs else None


def create_topology(store: Store, topology: Topology) -> None:
    """Create a topology, which is then the newest. Raises Contention if another job begins the same epoch."""
    store.blobs.prepare(TOPOLOGIES)
    try:
        store.blobs.create_exclusive(topology_path(topology.epoch), [topology.data])
    except FileExistsError:
        raise Contention(
            f"{store.where}: another job begins to write to this store", hint="let only one job write to it"
        ) from None


def complete_sets(
    store: Store, known: Mapping[int, ShardState] | None = None, *, of: int | None = None
) -> list[SealedSet]:
    """Return the whole states that all shards, or all ranks of the topology, have sealed, newest first.

    known: states of some shards, which are not read again.
    of: a shard. The newest topology with this shard is used, because a newer topology may have no whole state yet. A
        member's sealed states are whole for its own shard. Members have no whole state together.
    """
    epochs = topology_epochs(store)
    if epochs:
        newest_first = (read_topology(store, epoch) for epoch in reversed(epochs))
        found = next((one for one in newest_first if of is None or of in one.shards), None)
        shards: Sequence[int] = () if found is None else found.shards
        if found is not None and found.independent and of is not None:
            shards = (of,)
    else:
        shards = store.shards()
    states = store.states(shard for shard in shards if shard not in (known or {}))
    states |= {shard: state for shard, state in (known or {}).items() if shard in shards}
    return sealed_sets(states.values())
