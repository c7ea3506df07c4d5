"""Delete snapshots and sealed states on request, and free the space that only they need.

If `prune` gets the store's lock, it is the store's writer for a moment: it claims a term, compacts and collects. Next
to a live writer it deletes only files that this writer never uses: names of snapshots, and segments of fenced writers.
The live writer collects the rest.

If several ranks have saved, each lane is collected separately. Lanes of an earlier division are *retired* once no state
needs them: they lose their partitions, and only a short log remains.
"""

from __future__ import annotations

import contextlib
import fnmatch
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scarctl.errors import Contention, UsageError
from scarctl.store.format import (
    is_segment_name,
    record_path,
    segment_path,
    shard_folder,
)
from scarctl.store.gc import FLOOR, RATIO, Collector, dead_uploads, orphans, segments_of, used_segments
from scarctl.store.hosts import gone_hosts, read_hosts, remove_hosts
from scarctl.store.members import taken_over
from scarctl.store.shard_state import ShardState
from scarctl.store.snapshot import SealedSet, Snapshot, delete_snapshot, sealed_sets, snapshots
from scarctl.store.store import Store
from scarctl.store.term import Place
from scarctl.store.topology import Topology, complete_sets, newest_topology
from scarctl.store.usage import usage
from scarctl.store.writer import StoreWriter, open_writer


@dataclass(frozen=True, kw_only=True)
class Retention:
    """States to keep in addition to the newest copies and the newest complete sealed state."""

    keep_last: int = 1
    """Number of newest sealed states to keep."""
    keep_every: int | None = None
    """Keep the first sealed state of every interval of this many steps."""
    keep: tuple[str, ...] = ()
    """Names or patterns. If not empty, snapshots that match none of them are deleted."""
    delete: tuple[str, ...] = ()
    """Snapshots to delete."""
    no_writer: bool = False
    """Assume that no process writes to this store, if it has no lock. A writer is fenced."""

    def __post_init__(self) -> None:
        for name, value in (("--keep-last", self.keep_last), ("--keep-every", self.keep_every)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class PrunePlan:
    """Plan of `prune`: a dry run shows it, a run carries it out."""

    delete_snapshots: tuple[Snapshot, ...]
    keep_snapshots: tuple[Snapshot, ...]
    keep_sealed: tuple[SealedSet, ...]
    drop_sealed: tuple[SealedSet, ...]
    files: tuple[str, ...]
    """Files to delete at once, unfinished uploads included. Compaction frees more."""
    bytes: int
    writer: str | None
    """Description of the live writer; None without one."""
    topology: Topology | None = None
    """Topology of the ranks that save to the store, if there are several."""
    retire: tuple[int, ...] = ()
    """Shards of earlier ranks that no state needs."""
    hosts: tuple[str, ...] = ()
    """Places of hosts whose records are to be deleted: see `scarctl.store.hosts`."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "deleted_snapshots": [s.to_json() for s in self.delete_snapshots],
            "kept_snapshots": [s.to_json() for s in self.keep_snapshots],
            "kept_sealed_steps": [s.step for s in self.keep_sealed],
            "dropped_sealed_steps": [s.step for s in self.drop_sealed],
            "live_writer": self.writer,
            **({} if self.topology is None else {"retired_shards": list(self.retire)}),
        }

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.collects or self.hosts)

    @property
    def collects(self) -> bool:
        """Whether the state in the store needs less than it has."""
        return bool(self.files or self.delete_snapshots)


@dataclass
class Pruned:
    """Counts of deleted and moved files and bytes."""

    files: int = 0
    bytes: int = 0
    """Bytes by which the store became smaller."""
    moved_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """`bytes` and `live_bytes` of the store afterwards."""


def plan_prune(store: Store, retention: Retention) -> PrunePlan:
    """Plan a pruning without changing anything. Raises UsageError (no such snapshot), Corruption."""
    found = snapshots(store)
    names = {s.name for s in found}
    for name in retention.delete:
        if name not in names:
            raise UsageError(f"there is no snapshot {name!r} in {store.url}", kind="no-snapshot")
    for pattern in retention.keep:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"no snapshot matches {pattern!r}", hint="nothing was deleted", kind="no-snapshot"
            )

    def goes(name: str) -> bool:
        return name in retention.delete or bool(
            retention.keep and not any(fnmatch.fnmatchcase(name, pattern) for pattern in retention.keep)
        )

    gone, kept = [s for s in found if goes(s.name)], [s for s in found if not goes(s.name)]
    states = store.states(store.shards())
    topology = newest_topology(store)
    sealed = sealed_sets(states.values()) if topology is None else complete_sets(store, states)
    writer = None if retention.no_writer and store.address.root is None else _live_writer(store)
    # Alongside a live writer no sealed state is given up.
    keep_sealed = _retained(sealed, retention) if writer is None else sealed
    stays = [s.places for s in keep_sealed] + [s.places for s in kept]
    files: dict[str, int] = {}
    older = {} if topology is None else {s: state for s, state in states.items() if s not in topology.shards}
    # A sealed state of the current ranks replaces the shards of earlier ranks.
    if topology is not None and topology.independent:
        replaced = taken_over(store, topology, states)
    else:
        replaced = set(older) if sealed else set()
    free = [s for s in older if s in replaced and not any(s in snapshot.places for snapshot in kept)]
    retire = {shard: files_of for shard in free if (files_of := _of_retired(store, older[shard]))}
    for shard, state in states.items():
        if shard in retire:
            files |= retire[shard]
        elif writer is not None:
            files |= {segment_path(shard, name): size for name, size in orphans(store, shard)}
        elif shard not in older and state.seq >= 0 and not state.doubt.any():
            pins = {places[shard] for places in stays if shard in places}
            pins |= {seal.place for seal in state.sealed[-1:]}
            files |= _collectable(store, state, pins)
    if writer is not None:
        files |= {path: 0 for path, _ in dead_uploads(store, _terms(store, states))}
    return PrunePlan(
        tuple(gone),
        tuple(kept),
        tuple(keep_sealed),
        tuple(s for s in sealed if s.places not in stays),
        tuple(files),
        sum(files.values()),
        writer,
        topology,
        tuple(retire),
        tuple(gone_hosts(read_hosts(store), time.time())),
    )


def prune(store: Store, plan: PrunePlan) -> Pruned:
    """Carry a plan out. A kill at any point loses no kept state.

    Raises Corruption (damage hides which files are needed: no more are deleted), Contention (a writer came meanwhile),
    AccessDenied, Unavailable.
    """
    states = store.states(store.shards())
    before = usage(store, states.values())["bytes"]
    done = Pruned()
    if plan.writer is not None:
        _delete_names(store, plan)
        for shard in states:
            for name, _ in orphans(store, shard):
                done.files += _delete(store, segment_path(shard, name))
        for path, token in dead_uploads(store, _terms(store, states)):
            store.blobs.abort(path, token)
            done.files += 1
    else:
        topology = plan.topology
        views = [store] if topology is None else [store.of_shard(shard) for shard in topology.shards]
        if not plan.collects and _is_small(store, states):
            views = []
        with contextlib.ExitStack() as stack:
            # All lanes are opened first: a writer that has come is found before anything is deleted.
            writers = []
            for view in views:
                layout = view.current_layout()
                if layout is not None:
                    writers.append(stack.enter_context(open_writer(view, layout=layout)))
            _delete_names(store, plan)
            for writer in writers:
                _collect(writer, plan.keep_sealed, done)
    for shard in plan.retire:
        # While a job is alive, the holder of the shard's lock may still save copies from memory to it.
        with contextlib.suppress(*([Contention] if plan.writer is not None else [])):
            _retire(store, states[shard], done)
    done.files += remove_hosts(store, plan.hosts)
    states = store.states(states)
    done.sizes = usage(store, states.values())
    done.bytes = before - done.sizes["bytes"]
    return done


def _collect(writer: StoreWriter, keep: tuple[SealedSet, ...], done: Pruned) -> None:
    collector = Collector(writer, floor=0)
    collector.collect(keep)
    done.files += collector.done.deleted_files
    done.moved_bytes += collector.done.moved_bytes


def _retire(store: Store, state: ShardState, done: Pruned) -> None:
    """Remove all members of a shard, and collect their files. After a kill, the next call continues."""
    assert state.layout is not None, "a shard with files has a layout"
    with open_writer(store.of_shard(state.shard), layout=state.layout, empty=True) as writer:
        none = np.empty(0, np.int64)
        # The newest extras and the newest seal of a lane are always kept, so this commit replaces them.
        writer.commit(none, _nothing, step=max(0, state.step), sealed=True, extras={"retired": True})
        _collect(writer, (), done)


def _nothing(group: int, tensor: int, start: int, stop: int) -> memoryview:
    raise AssertionError("a retired shard has no members")


def _of_retired(store: Store, state: ShardState) -> dict[str, int]:
    """Return the files of a shard that retiring it would delete; {} if it is retired."""
    if state.layout is None or _is_retired(store, state):
        return {}
    files = _records(store, state.shard)
    folder = f"{shard_folder(state.shard)}/seg"
    return {f"{folder}/{name}": size for name, size in store.blobs.files(folder)} | files


def _is_retired(store: Store, state: ShardState) -> bool:
    """Return whether `_retire` has completed."""
    if len(state.ids) or not state.sealed:
        return False
    own = {segment.name for segment in used_segments(state)}
    own |= segments_of(store.log(state.shard), state, [seal.place for seal in state.sealed])
    there = {name for name in store.blobs.names(f"{shard_folder(state.shard)}/seg") if is_segment_name(name)}
    return there <= own and len(_records(store, state.shard)) <= _USUAL


def _is_small(store: Store, states: Mapping[int, ShardState]) -> bool:
    """Return whether compaction is not needed. Each of its turns would write a table."""
    sizes = usage(store, states.values())
    return sizes["bytes"] <= RATIO * sizes["live_bytes"] + FLOOR * len(states)


def _terms(store: Store, states: Mapping[int, ShardState]) -> dict[int, int]:
    return {shard: max(store.log(shard).terms(), default=0) for shard in states}


def _retained(sealed: list[SealedSet], retention: Retention) -> list[SealedSet]:
    """Return the sealed sets (newest first) that stay."""
    kept = list(sealed[: retention.keep_last])
    if retention.keep_every is not None:
        first: dict[tuple[int, int], SealedSet] = {}
        for one in sealed:  # newest first, so the first of a span is what is written last
            first[one.epoch, one.step // retention.keep_every] = one
        kept += [one for one in first.values() if one not in kept]
    return sorted(kept, key=lambda one: (one.epoch, one.step), reverse=True)


def _collectable(store: Store, state: ShardState, pins: set[Place]) -> dict[str, int]:
    """Return the files of a lane, with their bytes, that only its past states need."""
    shard = state.shard
    needed = {segment.name for segment in used_segments(state)} | segments_of(store.log(shard), state, pins)
    found = {
        segment_path(shard, name): size
        for name, size in store.blobs.files(f"{shard_folder(shard)}/seg")
        if is_segment_name(name) and name not in needed
    }
    stay = {place.path(shard) for place in pins} | ({state.place.path(shard)} if state.place else set())
    found |= {path: size for path, size in _records(store, shard).items() if path not in stay}
    return found if any("/seg/" in path for path in found) or len(found) > _USUAL else {}


_USUAL = 6  # records and segments that collecting leaves, and that it creates each time


def _records(store: Store, shard: int) -> dict[str, int]:
    """Return the records of a lane, with their bytes, but for those that close the log of a term."""
    log, found = store.log(shard), {}
    logs = log.logs()
    for number, term in logs:
        there = list(log.files(number, term).items())
        for k, size in there if (number, term) == logs[-1] else there[:-1]:
            found[record_path(shard, number, term, k)] = size
    return found


def _live_writer(store: Store) -> str | None:
    """Describe the holder of the store's lock. In a store without locks, any process may be writing."""
    if store.address.root is None:
        return f"{store.where}: a remote store has no lock, so there may be a writer"
    try:
        store.return_lock(store.take_lock())
    except Contention as error:
        return error.message
    return None


def _delete_names(store: Store, plan: PrunePlan) -> None:
    for snapshot in plan.delete_snapshots:
        try:
            delete_snapshot(store, snapshot.name)
        except UsageError:
            continue  # another process has deleted it


def _delete(store: Store, path: str) -> int:
    try:
        store.blobs.delete(path)
    except FileNotFoundError:
        return 0
    return 1
