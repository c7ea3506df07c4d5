"""Find sealed states, and name those to keep (docs/FORMAT.md, section 9).

A snapshot is a small file that names one full record of every lane. Creating one needs no lock. The file is created
first, then the newest full records are read: a collector may have given the state up meanwhile. A collector works in
the opposite order, full record first, then the list of snapshots. So one of the two sees the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from scarctl.errors import Corruption, Unavailable, UsageError
from scarctl.state.version import MAX_EPOCH, MAX_STEP
from scarctl.store.format import (
    FORMAT,
    MAX_FLAT,
    MAX_SHARDS,
    MAX_SNAPSHOT,
    SNAPSHOTS,
    Fields,
    corrupt,
    dump_json,
    load_json,
    log_folder,
    name_of_snapshot,
    shard_of_folder,
    snapshot_path,
)
from scarctl.store.term import Place, now, who

if TYPE_CHECKING:
    from scarctl.store.shard_state import ShardState
    from scarctl.store.store import Store


@dataclass(frozen=True)
class SealedSet:
    """One whole state. `places` has the sealed record of each lane."""

    epoch: int
    step: int
    places: Mapping[int, Place]
    whole: str
    """The name that its records share."""

    @property
    def seqs(self) -> dict[int, int]:
        """The numbers of the records: see `Place.seq`."""
        return {shard: place.seq for shard, place in self.places.items()}


@dataclass(frozen=True)
class Snapshot(SealedSet):
    """A sealed set with a name."""

    name: str
    layout: str
    created: str = field(default_factory=now)
    writer: str = field(default_factory=who)

    @cached_property
    def data(self) -> bytes:
        """The file's content."""
        places = {str(shard): place.to_json() for shard, place in self.places.items()}
        return dump_json({"format": FORMAT, "kind": "snapshot", **asdict(self), "places": places})

    @staticmethod
    def parse(data: bytes, what: object, *, name: str) -> Snapshot:
        """Parse a snapshot from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        # It has one list for each lane.
        f = Fields(load_json(data, what, containers=MAX_FLAT + MAX_SHARDS, values=4 * MAX_SHARDS), what)
        if f.text("kind") != "snapshot" or f.text("name") != name:
            raise corrupt(what, "it is the snapshot of another name")
        places = f.raw("places")
        if not isinstance(places, dict) or not places:
            raise corrupt(what, "it names no records")
        found: dict[int, Place] = {}
        for text, place in places.items():
            shard = shard_of_folder(text)
            if shard is None:
                raise corrupt(what, "its records are malformed")
            found[shard] = Place.from_json(place, what)
        return Snapshot(
            f.integer("epoch", 1, MAX_EPOCH),
            f.integer("step", 0, MAX_STEP),
            found,
            f.hex("whole", 32),
            name,
            f.hex("layout", 64),
            f.text("created"),
            f.text("writer"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values."""
        return {"name": self.name, "step": self.step, "epoch": self.epoch, "created": self.created}


def check_snapshot_name(name: str) -> str:
    """Return `name`. Raises UsageError if it cannot be the name of a snapshot."""
    if name_of_snapshot(f"{name}.json") is None:
        raise UsageError(
            f"{name!r:.80} cannot be the name of a snapshot",
            hint="use 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit",
        )
    return name


def check_new_snapshot(store: Store, name: str) -> None:
    """Raise UsageError if `name` cannot be the name of a snapshot, or exists (kind "snapshot-exists").

    This is an early check, before expensive work. `create_snapshot` decides.
    """
    if check_snapshot_name(name) in snapshot_names(store):
        raise _taken(name)


def _taken(name: str) -> UsageError:
    return UsageError(
        f"a snapshot {name!r} already exists",
        hint="use another name, or delete it: `scarctl snapshot delete`",
        kind="snapshot-exists",
    )


def snapshot_names(store: Store) -> list[str]:
    """Return the names of all snapshots, sorted."""
    found = (name_of_snapshot(file) for file, _ in store.blobs.files(SNAPSHOTS))
    return sorted(name for name in found if name is not None)


def read_snapshot(store: Store, name: str) -> Snapshot:
    """Return a snapshot by its name. Raises UsageError (kind "no-snapshot"), Corruption."""
    path = snapshot_path(check_snapshot_name(name))
    try:
        data = store.blobs.read(path, MAX_SNAPSHOT)
    except FileNotFoundError:
        known = ", ".join(snapshot_names(store)[:10])
        raise UsageError(
            f"there is no snapshot {name!r} in {store.url}",
            hint=f"snapshots: {known}" if known else "the store has no snapshots",
            kind="no-snapshot",
        ) from None
    return Snapshot.parse(data, store.blobs.where(path), name=name)


def snapshots(store: Store) -> list[Snapshot]:
    """Return all snapshots, by name. Raises Corruption if one is damaged, because the states it keeps are unknown."""
    found = []
    for name in snapshot_names(store):
        try:
            found.append(read_snapshot(store, name))
        except UsageError:
            continue  # deleted meanwhile
    return found


def create_snapshot(store: Store, name: str, sealed: SealedSet) -> Snapshot:
    """Name the sealed set, so that it is kept until the snapshot is deleted.

    Raises UsageError (kind "snapshot-exists"); AccessDenied, Unavailable, InDoubt. Raises Unavailable (kind
    "snapshot-late") if the set was given up for collection before it had its name: seal again.
    """
    check_snapshot_name(name)
    late = Unavailable(
        f"the state of step {sealed.step} was collected before it became snapshot {name!r}",
        hint="save the whole state again, then take the snapshot",
        kind="snapshot-late",
    )
    first = min(sealed.places)
    try:
        layout = store.log(first).at(sealed.places[first]).layout
    except FileNotFoundError:
        raise late from None
    snapshot = Snapshot(sealed.epoch, sealed.step, dict(sealed.places), sealed.whole, name, layout)
    path = snapshot_path(name)
    for shard, place in sealed.places.items():
        # The record may not be durable yet, and the snapshot must not outlive it in a power loss.
        store.blobs.prepare(log_folder(shard, place.number, place.id))
    store.blobs.prepare(SNAPSHOTS)
    try:
        store.blobs.create_exclusive(path, [snapshot.data])
    except FileExistsError:
        raise _taken(name) from None
    for shard, place in sealed.places.items():
        if not any(seal.place == place for seal in store.state(shard).sealed):
            delete_snapshot(store, name)
            raise late
    return snapshot


def delete_snapshot(store: Store, name: str) -> None:
    """Delete a snapshot permanently. Files that only it needs are collected later.

    Raises UsageError (kind "no-snapshot").
    """
    path = snapshot_path(check_snapshot_name(name))
    there = store.blobs.has(path)
    if there:
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            store.blobs.delete(path)
    settle_snapshots(store)
    if not there:
        raise UsageError(f"there is no snapshot {name!r} in {store.url}", kind="no-snapshot")


def settle_snapshots(store: Store) -> None:
    """Make the deletion of snapshots durable, before files that only they needed are deleted.

    Otherwise a power loss could restore a snapshot's file, if the process that deleted it died too early.
    """
    store.blobs.prepare(SNAPSHOTS)


def sealed_sets(states: Iterable[ShardState]) -> list[SealedSet]:
    """Return the whole states that all lanes with partitions have sealed, newest first.

    Without a record in one of the lanes there is none: its partitions are not known.
    """
    states = list(states)
    owners = [state for state in states if len(state.ids)]
    # If a lane has several seals of one state, the newest counts.
    by_shard = {s.shard: {seal.whole: seal for seal in s.sealed} for s in owners}
    if not by_shard or any(state.layout is None for state in states):
        return []
    found = []
    for whole in set.intersection(*(set(of) for of in by_shard.values())):
        seals = {shard: of[whole] for shard, of in by_shard.items()}
        newest = max(seals.values(), key=lambda seal: (seal.epoch, seal.step))
        places = {shard: seal.place for shard, seal in seals.items()}
        found.append(SealedSet(newest.epoch, newest.step, places, whole))
    first = min(by_shard)
    return sorted(found, key=lambda one: one.places[first].seq, reverse=True)


def lost_seals(states: Iterable[ShardState], known: Sequence[SealedSet]) -> tuple[str, ...]:
    """Return the damage that may hide newer whole states than those known, newest first: the reasons, for display."""
    seqs = known[0].seqs if known else {}
    return tuple(
        damage.reason
        for state in states
        for damage in state.damaged
        if damage.sealed and damage.seq > seqs.get(state.shard, -1)
    )


def is_kept(store: Store, state: ShardState, seq: int) -> bool:
    """Return whether the state after record `seq` is kept. `state`: the lane's newest.

    A state that was given up is not kept, even while its files exist: they may be about to be deleted.
    """
    place = state.place
    if place is not None and place._replace(k=state.full).seq <= seq <= state.seq:
        return True
    named = any(s.seqs.get(state.shard) == seq for s in snapshots(store))
    if not named and all(seal.seq != seq for seal in state.sealed):
        return False
    try:
        return not store.state(state.shard, at=seq).damaged
    except Corruption:
        return False
