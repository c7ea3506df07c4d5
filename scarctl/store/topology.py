"""List the shards of a job's ranks: one shard per rank (docs/FORMAT.md, section 10).

Every rank saves its share of the state to its own shard, with its own log, lock and epochs. A small file per start of
the job, `topology/<epoch>.json`, has the epoch that all ranks begin with, and the shard of every rank. A job that
restarts with the same division keeps its shards. With another division it gets new ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scarctl.errors import Contention, Corruption, UsageError
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
from scarctl.store.record import now, who
from scarctl.store.snapshot import SealedSet, sealed_sets
from scarctl.util.text import counted

if TYPE_CHECKING:
    from scarctl.store.shard_state import Seal, ShardState
    from scarctl.store.store import Store

_HEAL = (
    "data are not affected; restore the file from a backup. If the job had the same ranks at its previous start, this "
    "file may be deleted: the previous topology names the same shards"
)


@dataclass(frozen=True)
class Topology:
    """The shards of a job's ranks, from one start on."""

    epoch: int
    """The least epoch that every rank begins."""
    shards: tuple[int, ...]
    """Shard of every rank."""
    division: str
    """SHA-256 of the division of the state among the ranks: 64 hex digits."""
    created: str = field(default_factory=now)
    writer: str = field(default_factory=who)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.shards)

    @property
    def data(self) -> bytes:
        """The file's content."""
        return dump_json(
            {
                "format": FORMAT,
                "kind": "topology",
                "epoch": self.epoch,
                "shards": list(self.shards),
                "division": self.division,
                "created": self.created,
                "writer": self.writer,
            }
        )

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
        return Topology(epoch, tuple(shards), f.hex("division", 64), f.text("created"), f.text("writer"))


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
    """Raise UsageError (kind "store-of-ranks") if several ranks save to the store, each to its own shard."""
    newest = newest_topology(store) if store.part is None else None
    if newest is not None:
        raise UsageError(
            f"{store.where}: this store is written by {counted(newest.world, 'rank')}",
            hint="one process cannot save to it: start the job with its ranks, or use another store",
            kind="store-of-ranks",
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
            f"{store.where}: another job begins to write to this store",
            hint="let only one job write to it",
        ) from None


def complete_sets(
    store: Store, known: Mapping[int, ShardState] | None = None, *, of: int | None = None
) -> list[SealedSet]:
    """Return the whole states that all shards, or all ranks of the topology, have sealed, newest first.

    known: states of some shards, which are not read again.
    of: a shard. The newest topology with this shard is used, because a newer topology may have no whole state yet.
    """
    epochs = topology_epochs(store)
    if epochs:
        newest_first = (read_topology(store, epoch).shards for epoch in reversed(epochs))
        shards: Sequence[int] = next((found for found in newest_first if of is None or of in found), ())
    else:
        shards = store.shards()
    states = store.states(shard for shard in shards if shard not in (known or {}))
    states |= {shard: state for shard, state in (known or {}).items() if shard in shards}
    return sealed_by_all(states, epochs) if epochs else sealed_sets(states.values())


def sealed_by_all(states: Mapping[int, ShardState], epochs: list[int]) -> list[SealedSet]:
    """Return the whole states that all shards of a topology have sealed, newest first.

    epochs: epochs of all topologies, ascending. Records of an earlier format belong together if step and start of the
        job are equal. A rank's own epochs lie between two of these epochs, because its daemon may have been replaced.
    """
    if any(state.layout is None for state in states.values()):
        return []  # a shard has not begun, or its log is lost, so its members are unknown
    return sealed_sets(states.values(), alike(epochs))


def alike(epochs: list[int]) -> Callable[[Seal], Hashable]:
    """Return the common key of sealed records of an earlier format in logs of ranks: see `sealed_by_all`."""
    return lambda seal: (bisect_right(epochs, seal.epoch), seal.step)
