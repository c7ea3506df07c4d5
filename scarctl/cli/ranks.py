"""What `scarctl inspect` shows of a store that several ranks have written, each to its own shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scarctl.cli.ages import age_of, lag_of, since_of
from scarctl.cli.inspect import Survey, rework_cell
from scarctl.cli.output import human_bytes
from scarctl.daemon.kinship import view_of
from scarctl.daemon.peek import ArenaView
from scarctl.joint import fallback_note
from scarctl.layout import Layout
from scarctl.outlook import parameters_of, stored_outlook
from scarctl.parts import Parts
from scarctl.prediction import Rework
from scarctl.store import Store, check_backed, newest_topology, snapshots, topology_epochs
from scarctl.store.format import shard_folder
from scarctl.store.topology import read_topology
from scarctl.version import NEVER, step_of

if TYPE_CHECKING:
    from scarctl.group import Group
    from scarctl.store import ShardState, Topology

Ids = NDArray[np.int64]

COLUMNS = (
    "rank",
    "shard",
    "partitions",
    "bytes",
    "saved steps",
    "age",
    "durable",
    "head",
    "process",
    "losing it changes",
    "rework",
)


class Layouts:
    """The layouts of all ranks as one, as far as looking at it goes: partitions are numbered on from rank to rank."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = list(layouts)
        self._base = np.cumsum([0, *(layout.partitions for layout in layouts)])
        self._groups_base = np.cumsum([0, *(len(layout.groups) for layout in layouts)])
        self.groups: tuple[Group, ...] = tuple(group for layout in layouts for group in layout.groups)
        self.partitions = int(self._base[-1])
        self.nbytes = sum(layout.nbytes for layout in layouts)
        sizes = [layout.partition_bytes for layout in layouts]
        self.partition_bytes: Ids = np.concatenate([np.empty(0, np.int64), *sizes])

    def group_of(self, ids: Ids) -> Ids:
        """Index of every partition's group."""
        found = np.empty_like(ids)
        for n, mine in self._by_layout(ids):
            found[mine] = self._layouts[n].group_of(ids[mine] - self._base[n]) + self._groups_base[n]
        return found

    def row_ranges(self, ids: Ids) -> tuple[Ids, Ids]:
        """First row and last row + 1 of every partition in the whole tensor."""
        starts, stops = np.empty_like(ids), np.empty_like(ids)
        for n, mine in self._by_layout(ids):
            starts[mine], stops[mine] = self._layouts[n].row_ranges(ids[mine] - self._base[n])
        first = np.array([group.first_row for group in self.groups], dtype=np.int64)[self.group_of(ids)]
        return starts + first, stops + first

    def _by_layout(self, ids: Ids) -> list[tuple[int, NDArray[np.bool_]]]:
        of = np.searchsorted(self._base, ids, side="right") - 1
        return [(n, of == n) for n in range(len(self._layouts)) if (of == n).any()]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a store's newest whole state, at one moment."""

    topology: Topology
    lines: list[dict[str, Any]]
    """By rank."""
    older: list[dict[str, Any]]
    """Shards of ranks of other starts of the job."""
    note: str | None
    """Why this is not the newest topology; None when it is."""

    def to_json(self) -> dict[str, Any]:
        """Fields of the document."""
        topology = self.topology
        return {
            "topology": {
                "world": topology.world,
                "epoch": topology.epoch,
                "shards": list(topology.shards),
                "created": topology.created,
                "note": self.note,
            },
            "ranks": self.lines,
            "other_shards": self.older,
        }

    def summary(self) -> list[str]:
        """Lines for people."""
        topology = self.topology
        here = [line for line in self.lines if line["alive"] is not None]
        alive = sum(line["alive"] for line in here)
        lines = [f"{topology.world} ranks, since epoch {topology.epoch}; one shard each"]
        if here:
            pending, errors = (sum(line[name] for line in here) for name in ("pending_partitions", "errors"))
            dead = [str(line["rank"]) for line in here if not line["alive"]]
            said = f"; stopped: rank {', '.join(dead)}" if dead and alive else ""
            lines.append(
                f"ranks on this host: {alive} of {len(here)} alive{said}, {pending} partitions not durable yet, "
                f"{errors} errors"
            )
        held = [shard for shard in self.older if not shard["retired"]]
        if held:
            names = ", ".join(str(shard["shard"]) for shard in held)
            size = human_bytes(sum(shard["bytes"] for shard in held))
            lines.append(
                f"shards of other ranks: {names}, {size} (`scarctl prune` retires what nobody needs)"
            )
        gone = [str(shard["shard"]) for shard in self.older if shard["retired"]]
        if gone:
            lines.append(f"retired shards: {', '.join(gone)}")
        return [*lines, *([self.note] if self.note else [])]

    def rows(self, view: Survey) -> list[tuple[str, ...]]:
        """Cells of the ranks' table. view: what they are part of."""
        step = view.step or 0
        rows: list[tuple[str, ...]] = []
        for line in self.lines:
            oldest, newest, change = line["oldest_step"], line["newest_step"], line["perturbation"]["value"]
            known = line["alive"] is not None
            process = (
                f"{line['pid']} ({'alive' if line['alive'] else 'stopped'})" if known else "not on this host"
            )
            rows.append(
                (
                    str(line["rank"]),
                    str(line["shard"]),
                    str(line["partitions"]),
                    human_bytes(line["bytes"]),
                    "-" if oldest is None else f"{oldest}..{newest}",
                    "never saved"
                    if oldest is None or line["never_saved"]
                    else view.age.at_least(max(0, step - oldest)),
                    "-" if line["durable_step"] is None else str(line["durable_step"]),
                    "-" if line["head_step"] is None else str(line["head_step"]),
                    process,
                    "unknown" if change is None else f"{change:.4g}",
                    rework_cell(line),
                )
            )
        return rows


def survey_ranks(store: Store, arena_dir: str | None, parts: Parts | None) -> Survey:
    """Like `inspect.survey`, for a store with a topology. parts: its newest whole state, of ranks, if there is one."""
    topology = parts.topology if parts is not None and parts.topology is not None else newest_topology(store)
    assert topology is not None, "asked for a store with one"
    states = store.states(topology.shards)
    check_backed(store, states.values())
    arenas = {shard: view_of(arena_dir, store.of_shard(shard)) for shard in topology.shards}
    layouts: dict[int, Layout] = {}
    for shard, state in states.items():
        arena = arenas[shard]
        layout = state.layout if state.layout is not None else arena.layout if arena is not None else None
        layouts[shard] = layout if layout is not None else Layout([])
    joined = Layouts(list(layouts.values()))
    version = np.concatenate([_versions(states[s], layout) for s, layout in layouts.items()])
    distance = np.full(joined.partitions, np.nan)
    step, at = max(state.step for state in states.values()), 0
    for shard, layout in layouts.items():
        arena = arenas[shard]
        if arena is not None and arena.layout == layout:
            distance[at : at + layout.partitions] = arena.distance
            step = max(step, arena.head_step)
        else:
            arenas[shard] = None
        at += layout.partitions
    here = [arena for arena in arenas.values() if arena is not None]
    saving = [arenas[shard] for shard, layout in layouts.items() if layout.partitions]
    own = [
        (store, {shard: states[shard]}) for shard, layout in layouts.items() if parameters_of(layout).any()
    ]
    outlook, norm, caveats = stored_outlook(own, max(step, 0))
    view = Survey(
        store.url,
        step if step >= 0 else None,
        joined if joined.partitions else None,
        np.repeat(np.array(list(layouts), np.int32), [layout.partitions for layout in layouts.values()]),
        step_of(version),
        distance,
        store.usage(states),
        [snapshot.to_json() for snapshot in snapshots(store)],
        _run(here),
        age_of(store, topology.shards, saving),
        outlook=outlook,
        comparable=norm == "l2",
        since=max((since_of(arena, step) for arena in here), default=0),
        caveats=caveats,
    )
    by_shard = {line["shard"]: line for line in view.shards}
    lines = [
        _line(rank, shard, by_shard.get(shard), states[shard], arenas[shard], step)
        for rank, shard in enumerate(topology.shards)
    ]
    note = fallback_note(parts) if parts is not None and parts.passed_over else None
    if parts is None:
        note = f"{store.url}: no ranks have saved a whole state in this store yet"
    view.ranks.append(Ranks(topology, lines, _others(store, topology), note))
    return view


def _versions(state: ShardState, layout: Layout) -> Ids:
    version = np.full(layout.partitions, NEVER, dtype=np.int64)
    if state.layout == layout:
        version[state.ids] = state.version
    return version


def _run(arenas: Sequence[ArenaView]) -> dict[str, Any] | None:
    """The same fields as for one process, over all ranks on this host."""
    if not arenas:
        return None
    alive = [arena for arena in arenas if arena.alive]
    return {
        "pid": (alive or arenas)[0].pid,
        "alive": bool(alive),
        "head_step": max(arena.head_step for arena in arenas),
        "pending_partitions": sum(arena.pending for arena in arenas),
        "lag_steps": max(lag_of(arena) for arena in arenas),
        "errors": sum(arena.errors for arena in arenas),
    }


def _line(
    rank: int,
    shard: int,
    line: dict[str, Any] | None,
    state: ShardState,
    arena: ArenaView | None,
    step: int,
) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "shard": shard,
        "partitions": 0,
        "bytes": 0,
        "oldest_step": None,
        "newest_step": None,
        "never_saved": 0,
        "perturbation": {"value": None, "kind": "unknown"},
        "share": 0.0,
        "expected_perturbation": 0.0,
        "rework": Rework(0.0, 0.0, 0.0, "ages").to_json(),
    }
    found = line or nothing
    oldest = found["oldest_step"]
    return {
        "rank": rank,
        **found,
        "staleness": None if oldest is None else max(0, step - oldest),
        "durable_step": state.step if state.step >= 0 else None,
        "head_step": None if arena is None else arena.head_step,
        "pid": None if arena is None else arena.pid,
        "alive": None if arena is None else arena.alive,
        "pending_partitions": None if arena is None else arena.pending,
        "errors": None if arena is None else arena.errors,
    }


def _others(store: Store, topology: Topology) -> list[dict[str, Any]]:
    """Shards that are not of these ranks."""
    of: dict[int, int] = {}
    for epoch in topology_epochs(store):
        if epoch != topology.epoch:
            of |= dict.fromkeys(read_topology(store, epoch).shards, epoch)
    lines = []
    for shard in store.shards():
        if shard in topology.shards:
            continue
        folders = [f"{shard_folder(shard)}/{name}" for name in ("seg", "log", "index")]
        state = store.state(shard)
        lines.append(
            {
                "shard": shard,
                "epoch": of.get(shard),
                "bytes": sum(size for folder in folders for _, size in store.blobs.files(folder)),
                "retired": state.layout is not None and state.layout.partitions > 0 and not len(state.ids),
            }
        )
    return lines
