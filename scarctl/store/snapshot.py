"""Find sealed states, and name those to keep (docs/FORMAT.md, section 9).

A snapshot is a small file that names one record of every shard. Creating one needs no lock. The file is created first,
then the records are checked: a collector may have given them up meanwhile. A collector works in the opposite order,
boundary first, then the list of snapshots. So one of the two sees the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from scarctl.errors import Corruption, Unavailable, UsageError
from scarctl.state.version import MAX_EPOCH, MAX_STEP
from scarctl.store.format import (
    FORMAT,
    MAX_FLAT,
    MAX_SEQ,
    MAX_SHARDS,
    MAX_SNAPSHOT,
    SNAPSHOTS,
    Fields,
    corrupt,
    dump_json,
    load_json,
    name_of_snapshot,
    record_path,
    shard_folder,
    shard_of_folder,
    snapshot_path,
)
from scarctl.store.record import alone, now, who

if TYPE_CHECKING:
    from scarctl.store.shard_state import Seal, ShardState
    from scarctl.store.store import Store


@dataclass(frozen=True, slots=True)
class SealedSet:
    """One whole state. `seqs` has the sealed record of each shard."""

    epoch: int
    step: int
    seqs: Mapping[int, int]
    whole: str = ""
    """The identity that its records share. "": records of an earlier format, which only share the step."""


@dataclass(frozen=True)
class Snapshot:
    """A sealed set with a name."""

    name: str
    epoch: int
    step: int
    layout: str
    seqs: Mapping[int, int]
    whole: str = ""
    """See `SealedSet`."""
    created: str = field(default_factory=now)
    writer: str = field(default_factory=who)

    @cached_property
    def data(self) -> bytes:
        """The file's content."""
        return dump_json(
            {
                "format": FORMAT,
                "kind": "snapshot",
                "name": self.name,
                "epoch": self.epoch,
                "step": self.step,
                "layout": self.layout,
                "seqs": {str(shard): seq for shard, seq in self.seqs.items()},
                "whole": self.whole,
                "created": self.created,
                "writer": self.writer,
            }
        )

    @staticmethod
    def parse(data: bytes, what: object, *, name: str) -> Snapshot:
        """Parse a snapshot from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        f = Fields(load_json(data, what, containers=MAX_FLAT, values=MAX_SHARDS), what)
        if f.text("kind") != "snapshot" or f.text("name") != name:
            raise corrupt(what, "it is the snapshot of another name")
        seqs = f.raw("seqs")
        if not isinstance(seqs, dict) or not seqs:
            raise corrupt(what, "it names no records")
        found: dict[int, int] = {}
        for text, seq in seqs.items():
            shard = shard_of_folder(text)
            if shard is None or type(seq) is not int or not 0 <= seq <= MAX_SEQ:
                raise corrupt(what, "its records are malformed")
            found[shard] = seq
        return Snapshot(
            name,
            f.integer("epoch", 1, MAX_EPOCH),
            f.integer("step", 0, MAX_STEP),
            f.hex("layout", 64),
            found,
            "" if f.raw("whole") is None else f.hex("whole", 32, empty=True),
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
    try:
        layout = store.log(min(sealed.seqs)).record(sealed.seqs[min(sealed.seqs)]).layout
    except FileNotFoundError:
        raise late from None
    snapshot = Snapshot(name, sealed.epoch, sealed.step, layout, dict(sealed.seqs), sealed.whole)
    path = snapshot_path(name)
    for shard in sealed.seqs:
        # The record may not be durable yet, and the snapshot must not outlive it in a power loss.
        store.blobs.prepare(f"{shard_folder(shard)}/log")
    store.blobs.prepare(SNAPSHOTS)
    try:
        store.blobs.create_exclusive(path, [snapshot.data])
    except FileExistsError:
        raise _taken(name) from None
    for shard, seq in sealed.seqs.items():
        newest = store.log(shard).newest()
        if newest is None or newest.boundary > seq or not store.blobs.has(record_path(shard, seq)):
            delete_snapshot(store, name)
            raise late
    return snapshot


def delete_snapshot(store: Store, name: str) -> None:
    """Delete a snapshot permanently. Files that only it needs are collected later.

    Raises UsageError (kind "no-snapshot").
    """
    try:
        store.blobs.delete(snapshot_path(check_snapshot_name(name)))
    except FileNotFoundError:
        raise UsageError(f"there is no snapshot {name!r} in {store.url}", kind="no-snapshot") from None
    settle_snapshots(store)


def settle_snapshots(store: Store) -> None:
    """Make the deletion of snapshots durable, before files that only they needed are deleted.

    Otherwise a power loss could restore a snapshot's file, if the process that deleted it died too early.
    """
    store.blobs.prepare(SNAPSHOTS)


def sealed_sets(
    states: Iterable[ShardState], moment: Callable[[Seal], Hashable] = lambda seal: (seal.epoch, seal.step)
) -> list[SealedSet]:
    """Return the whole states that all shards with members have sealed, newest first.

    moment: the common key of a state's sealed records in an earlier format, which have no name of the whole state.
    """
    owners = [state for state in states if len(state.ids)]
    # If a shard has several seals of one state, the newest counts.
    by_shard = {s.shard: {seal.whole or moment(seal): seal for seal in s.sealed} for s in owners}
    if not by_shard:
        return []
    found = []
    for key in set.intersection(*(set(of) for of in by_shard.values())):
        seals = {shard: of[key] for shard, of in by_shard.items()}
        newest = max(seals.values(), key=lambda seal: (seal.epoch, seal.step))
        whole = newest.whole
        if not whole and len(seals) == 1:
            whole = alone(owners[0].shard, newest.seq)  # one record is one state
        found.append(SealedSet(newest.epoch, newest.step, {s: seal.seq for s, seal in seals.items()}, whole))
    first = min(by_shard)
    return sorted(found, key=lambda one: (one.epoch, one.step, one.seqs[first]), reverse=True)


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
    """Return whether the state after record `seq` is kept. `state`: the shard's newest.

    A state that was given up is not kept, even while its files exist: they may be about to be deleted.
    """
    if state.boundary <= seq <= state.seq:
        return True
    named = any(s.seqs.get(state.shard) == seq for s in snapshots(store))
    if not named and all(seal.seq != seq for seal in state.sealed):
        return False
    try:
        return not store.state(state.shard, at=seq).damaged
    except Corruption:
        return False
