"""Survey a store and the arenas of its run: steps, ages, sizes, distances, and the predicted rework of a lost shard.

A process that saves alone is surveyed as the only rank: its share is the whole state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.distances import from_store
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.arena.kinship import view_of
from scarctl.arena.notes import notes_in
from scarctl.arena.owner import read_owner
from scarctl.arena.view import ArenaView
from scarctl.config.options import DEFAULT_MAX_LAG
from scarctl.daemon.client import ask_status
from scarctl.errors import ScarError
from scarctl.ops.ages import age_of, lag_of, memory_age_of, since_of, waiting_in
from scarctl.ops.surveyed import OtherShard, RankLine, RunOnHost, Survey
from scarctl.recovery.forecast import stored_outlook
from scarctl.state.caveats import Caveat
from scarctl.state.encodings import ENCODINGS, Encoding
from scarctl.state.extras import Notes
from scarctl.state.layout import Layout
from scarctl.state.layouts import Layouts, parameters_of
from scarctl.state.version import NEVER, step_of
from scarctl.store import (
    ShardState,
    Store,
    Topology,
    newest_topology,
    snapshots,
    topology_epochs,
)
from scarctl.store.backing import check_backed
from scarctl.store.format import log_folder, shard_folder
from scarctl.store.shard_state import Damage
from scarctl.store.topology import read_topology
from scarctl.store.usage import usage
from scarctl.store.visible_damage import VisibleDamage, visible_damage
from scarctl.theory.convergence import NoEstimate
from scarctl.theory.rework import Outlook
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")

_PATIENCE = 1.0
"""Seconds to wait for the daemon's answer."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The share of one rank: its copies in the store, and its arena on this host. Arrays are over its partitions."""

    state: ShardState
    layout: Layout
    version: Ids
    shard_of: NDArray[np.int32]
    arena: ArenaView | None
    """The rank's arena; None without one, or if its layout differs from the store's."""
    id: str
    """Name of the rank's arena."""
    damaged: NDArray[np.bool_]
    """Whether the newest copy is in a damaged segment."""
    replica_of: str | None = None
    """See `RankLine`."""


def survey(store: Store, arena_dir: str | None) -> Survey:
    """Survey a store and the arenas of its run on this host. Takes no lock and changes nothing.

    Raises Corruption, AccessDenied, Unavailable.
    """
    topology, states, note, hidden = _newest_states(store)
    check_backed(store, states.values())
    damage = visible_damage(store, states)
    files = {one.file: one.why for one in hidden}
    for found in damage.values():
        files |= found.files
    if topology is None:
        shares = [_share(store, states, arena_dir, damage)]
    else:
        shares = [_share(store.of_shard(shard), states, arena_dir, damage) for shard in topology.shards]
    apart = topology is not None and topology.independent
    layout = Layouts(_named(shares) if apart else [share.layout for share in shares])
    arenas = [share.arena for share in shares if share.arena is not None]
    notes = [_waiting(arena_folder(arena_dir, share.id)) for share in shares if share.arena is not None]
    step = max((state.step for state in states.values()), default=-1)
    step = max([step, *(arena.head_step for arena in arenas)])
    with_parameters = [share for share in shares if parameters_of(share.layout).any()] or shares
    told = stored_outlook([(store, share.state) for share in with_parameters], max(step, 0))
    age = age_of(store, states, [share.arena for share in shares if share.layout.partitions])
    newest = told.events[-1] if told.events else None
    finished = newest is not None and newest.kind == "closed" and newest.step == step
    outlook = Outlook(max(step, 0), NoEstimate("each member converges alone")) if apart else told.outlook
    return Survey(
        store.url,
        step if step >= 0 else None,
        layout if layout.partitions else None,
        np.concatenate([share.shard_of for share in shares]),
        step_of(np.concatenate([share.version for share in shares])),
        np.concatenate([_distance(share) for share in shares]),
        usage(store, states.values()),
        age if not finished else replace(age, is_lower_bound=False, finished=True),
        outlook,
        snapshots=tuple(snapshots(store)),
        run=_run([share.arena for share in shares if share.arena is not None and share.replica_of is None]),
        ended=frozenset(n for n, share in enumerate(shares) if _has_ended(share)),
        topology=topology,
        ranks=() if topology is None else _ranks(topology, shares, arena_dir),
        others=() if topology is None else tuple(_others(store, topology)),
        note=note,
        comparable=told.norm == "l2",
        since=max((since_of(arena, step) for arena in arenas), default=0),
        kept_step=np.concatenate([_kept(share) for share in shares]) if arenas else None,
        waiting=np.concatenate([_waiting_copies(share) for share in shares]),
        caveats=_caveats(told.caveats, notes),
        memory_seconds=_since(notes),
        max_lag=max((one.max_lag for one in notes if one.max_lag is not None), default=DEFAULT_MAX_LAG),
        events=told.events,
        samples=told.samples,
        damage=tuple(sorted(files.items())),
        damaged=np.concatenate([share.damaged for share in shares]),
        hidden=bool(hidden) or any(state.doubt.any() for state in states.values()),
        encoded=_encoded(states.values()),
        encoding_error=np.concatenate([_errors(share) for share in shares]) if arenas else None,
        heads=np.repeat([_head(s) for s in shares], [s.layout.partitions for s in shares]) if apart else None,
    )


def _caveats(stored: Sequence[Caveat], notes: Iterable[Notes]) -> tuple[Caveat, ...]:
    """Return the caveats in the store, and those that only the arenas have, which replace older ones."""
    waiting = dict.fromkeys(caveat for one in notes for caveat in one.caveats)
    newer = {caveat.kind for caveat in waiting}
    return (*(caveat for caveat in stored if caveat.kind not in newer), *waiting)


def _waiting(folder: Path) -> Notes:
    """Return the notes of the newest state in an arena's folder."""
    try:
        return notes_in(folder) or Notes()
    except ScarError as error:
        log.warning("%s", error)
        return Notes()


def _since(notes: Sequence[Notes]) -> float | None:
    """Return the seconds since the oldest of the arenas' newest checkpoints; None if one is unknown, or without one."""
    times = [one.at for one in notes if one.at is not None]
    return max(0.0, time.time() - min(times)) if times and len(times) == len(notes) else None


def _encoded(states: Iterable[ShardState]) -> dict[Encoding, int]:
    """Return the number of newest copies in each encoding, but for exact ones."""
    found = np.zeros(len(ENCODINGS), dtype=np.int64)
    for state in states:
        found += np.bincount(state.encoding(np.arange(len(state.ids))), minlength=len(ENCODINGS))
    return {name: n for name, n in zip(ENCODINGS, found.tolist(), strict=True) if n and name != "exact"}


def _newest_states(
    store: Store,
) -> tuple[Topology | None, dict[int, ShardState], str | None, tuple[Damage, ...]]:
    """Return the ranks of the newest whole state, the states of its shards, and a note if a newer one is incomplete.

    Last, damage that may hide a newer one. Without a topology, a single process saved the state. If ranks have no whole
    state yet, their incomplete one is returned.
    """
    if not topology_epochs(store):
        return None, store.states(store.shards(), around=True), None, ()
    newest = newest_topology(store)
    if newest is not None and newest.independent:
        states = store.states(newest.shards, around=True)
        never = [number for number, shard in enumerate(newest.shards) if states[shard].layout is None]
        return newest, states, _never(newest, never) if never else None, ()
    # Imported here, because commands have to start fast, and most stores are of a single process.
    from scarctl.recovery.reshard import find_parts
    from scarctl.recovery.shares import fallback_note

    parts = find_parts(store, around=True)
    if parts is not None:
        note = fallback_note(parts) if parts.passed_over else None
        return parts.topology, dict(parts.states), note, parts.hidden
    topology = newest_topology(store)
    assert topology is not None, "the store has topologies"
    note = f"{store.url}: the store has no whole state of all ranks yet"
    return topology, store.states(topology.shards, around=True), note, ()


def _never(topology: Topology, numbers: Sequence[int]) -> str:
    """Return the note about members that have saved nothing yet."""
    listed = ", ".join(map(str, numbers))
    if topology.epoch == 1:
        return f"members that have saved nothing yet: {listed}"
    return f"members that have not started yet, whose parts the previous members still hold: {listed}"


def _share(
    store: Store, states: Mapping[int, ShardState], arena_dir: str | None, damage: Mapping[int, VisibleDamage]
) -> _Share:
    """Return one rank's share. store: the rank's view. states, damage: by shard."""
    arena, state = view_of(arena_dir, store), states.get(store.lane, ShardState(store.lane))
    layout = state.layout or (Layout([]) if arena is None else arena.layout)
    version = np.full(layout.partitions, NEVER, dtype=np.int64)
    damaged = np.zeros(layout.partitions, dtype=np.bool_)
    version[state.ids] = state.version
    if store.lane in damage:
        damaged[state.ids] = damage[store.lane].lost
    same = arena is not None and arena.layout == layout
    owner = read_owner(arena_folder(arena_dir, store.run_id)) if same else None
    named = None if owner is None else owner.host
    shard_of = store.shard_of(layout)
    return _Share(state, layout, version, shard_of, arena if same else None, store.run_id, damaged, named)


def _named(shares: Sequence[_Share]) -> list[Layout]:
    """Return the layouts of all members, with the names of the whole state."""
    from scarctl.recovery.shares import as_member

    return [as_member(share.layout, number) for number, share in enumerate(shares)]


def _head(share: _Share) -> int:
    """Return the newest known step of one member."""
    return share.state.step if share.arena is None else max(share.state.step, share.arena.head_step)


def _distance(share: _Share) -> NDArray[np.float64]:
    return np.full(share.layout.partitions, np.nan) if share.arena is None else from_store(share.arena)


def _errors(share: _Share) -> NDArray[np.float64]:
    return np.full(share.layout.partitions, -1.0) if share.arena is None else share.arena.encoding_error


def _kept(share: _Share) -> NDArray[np.int64]:
    return np.full(share.layout.partitions, -1) if share.arena is None else step_of(share.arena.newest)


def _waiting_copies(share: _Share) -> NDArray[np.bool_]:
    return np.zeros(share.layout.partitions, bool) if share.arena is None else waiting_in(share.arena)


def _has_ended(share: _Share) -> bool:
    return share.arena is not None and share.replica_of is None and share.arena.ended


def _run(arenas: Sequence[ArenaView]) -> RunOnHost | None:
    """Return the common status of all ranks on this host; None without ranks."""
    if not arenas:
        return None
    alive = [arena for arena in arenas if arena.alive]
    ages = [memory_age_of(arena) for arena in arenas]
    known = [age for age in ages if age is not None]
    return RunOnHost(
        pid=(alive or arenas)[0].pid,
        alive=bool(alive),
        head_step=max(arena.head_step for arena in arenas),
        pending_partitions=sum(arena.pending for arena in arenas),
        memory_age=max(known) if len(known) == len(ages) else None,
        lag_steps=max(lag_of(arena) for arena in arenas),
        errors=sum(arena.errors for arena in arenas),
        failed_saves=sum(arena.failed_saves for arena in arenas),
        interval=max((one.interval for one in arenas if one.interval is not None), default=None),
        overhead=max((one.overhead for one in arenas if one.overhead is not None), default=None),
    )


def _ranks(topology: Topology, shares: Sequence[_Share], arena_dir: str | None) -> tuple[RankLine, ...]:
    copies = _copies(shares, arena_dir)
    named = enumerate(zip(topology.shards, shares, strict=True))
    return tuple(_rank(rank, shard, share, copies.get(share.id, ())) for rank, (shard, share) in named)


def _copies(shares: Sequence[_Share], arena_dir: str | None) -> dict[str, tuple[str, ...]]:
    """Return by arena the copies of live ranks' memory on other hosts, as reported by this host's daemon, if any."""
    if not any(share.arena is not None and share.arena.alive for share in shares):
        return {}
    try:
        answer = ask_status(host_folder(arena_dir), patience=_PATIENCE)
    except ScarError as error:
        log.warning("copies on other hosts are not shown: %s", error)
        return {}
    return {} if answer is None else {run["id"]: tuple(run.get("peers", ())) for run in answer["runs"]}


def _rank(rank: int, shard: int, share: _Share, copies: tuple[str, ...]) -> RankLine:
    step, arena = share.state.step, share.arena
    durable = step if step >= 0 else None
    if arena is None:
        return RankLine(rank, shard, durable, None, None, None, None, None, None)
    return RankLine(
        rank,
        shard,
        durable,
        arena.head_step,
        arena.pid,
        arena.alive,
        arena.pending,
        arena.errors,
        arena.failed_saves,
        share.replica_of,
        copies,
    )


def _others(store: Store, topology: Topology) -> list[OtherShard]:
    """Return the shards that do not belong to these ranks."""
    epochs: dict[int, int] = {}
    for epoch in topology_epochs(store):
        if epoch != topology.epoch:
            epochs |= dict.fromkeys(read_topology(store, epoch).shards, epoch)
    lines = []
    for shard in store.shards():
        if shard in topology.shards:
            continue
        log = store.log(shard)
        folders = [f"{shard_folder(shard)}/seg", *(log_folder(shard, *term) for term in log.logs())]
        nbytes = sum(size for folder in folders for _, size in store.blobs.files(folder))
        state = store.state(shard, around=True)
        retired = state.layout is not None and state.layout.partitions > 0 and not len(state.ids)
        lines.append(OtherShard(shard, epochs.get(shard), nbytes, retired))
    return lines
