"""Planning a recovery: what was lost, and where its freshest intact copy is.

A `Plan` says for every lost partition from which tier which version comes. The dry run prints it,
`scarctl.execution` carries it out. Only what was lost is restored; survivors stay where they are (Qiao et
al., ICML 2019, section 4.1: partial recovery).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arrays import distinct
from scarctl.daemon.arena import Arena
from scarctl.errors import Corruption, LayoutMismatch, NoIntactCopy, UsageError
from scarctl.layout import Layout
from scarctl.store import SealedSet, ShardState, Snapshot, Store, complete_sets, sealed_sets
from scarctl.version import NEVER, step_of

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Lost = str | int | Iterable[str | int]

TIERS = ("live", "memory", "peer", "store")
"""Where a copy is, freshest first: a surviving process, this host's memory, another host's, the store."""
MEMORY = 1
STORE = 3

_NAMES_SHOWN = 5


def lost_ids(spec: Lost, layout: Layout, shard_of: NDArray[np.int32], shards: int | None = None) -> Ids:
    """Ids, ascending, of the partitions that `spec` means.

    spec: "all", shard numbers, patterns of groups or partitions ('layers.3.*', 'emb.weight[0:512]'), or
    several of
        them, as a list or separated by commas.
    shards: number of shards; default is the highest in `shard_of` plus one.

    Raises UsageError naming what does not exist and what does.
    """
    count = shards if shards is not None else int(shard_of.max(initial=-1)) + 1
    items = [
        item for part in ([spec] if isinstance(spec, str | int) else spec) for item in _items(part, layout)
    ]
    if not items:
        raise UsageError("nothing is named as lost", hint="give shard numbers, patterns of names, or 'all'")
    lost = np.zeros(layout.partitions, dtype=bool)
    for item in items:
        if item == "all":
            lost[:] = True
        elif isinstance(item, int) or item.isdecimal():
            if not 0 <= int(item) < count:
                known = "there is only shard 0" if count == 1 else f"shards are 0..{count - 1}"
                raise UsageError(f"there is no shard {item}", hint=known)
            lost |= shard_of == int(item)
        else:
            lost[layout.match(item)] = True
    return np.flatnonzero(lost)


def _items(part: str | int, layout: Layout) -> list[str | int]:
    if isinstance(part, int):
        return [part]
    # A comma may belong to a name: the whole text is tried first.
    if "," in part and any(group.name == part for group in layout.groups):
        return [part]
    return [item for item in (piece.strip() for piece in part.split(",")) if item]


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be restored from where. Arrays are parallel to `ids`."""

    mode: str
    """"partial", or "rollback": everything, to the newest state that all shards sealed at one step."""
    layout: Layout
    shard_of: NDArray[np.int32]
    """Shard of every partition of the layout."""
    lost: int
    """Number of partitions that were named as lost."""
    ids: Ids
    """Partitions to restore, ascending."""
    tier: NDArray[np.int8]
    """Index into `TIERS`."""
    version: Ids
    states: Mapping[int, ShardState]
    """Per shard the state that store copies are read from."""
    exact: bool
    """Afterwards the whole state is as one commit of it has saved it."""
    step: int | None
    """The step of everything restored, None when steps are mixed."""
    whole: str = ""
    """The commit of the whole state that all copies to restore are of (`Record.whole`), "" when they are of none."""
    seqs: Mapping[int, int] = field(default_factory=dict)
    """Rollback: per shard the sealed record that is gone back to."""
    sealed: tuple[int, int, str] | None = None
    """Rollback: epoch, step and identity of the sealed state, by which all ranks know it."""
    degraded: bool = False
    """A newer acknowledged version exists, but no intact copy of it."""
    snapshot: str | None = None
    """Rollback: the snapshot that is gone back to, if it is one."""

    @property
    def nbytes(self) -> int:
        return int(self.layout.partition_bytes[self.ids].sum())

    def to_json(self) -> dict[str, Any]:
        """The fields of a report, as far as they are known before."""
        return {
            "mode": self.mode,
            "exact": self.exact,
            "degraded": self.degraded,
            "step": self.step,
            "snapshot": self.snapshot,
            "lost_partitions": self.lost,
            "restored_partitions": len(self.ids),
            "bytes": self.nbytes,
            "tiers": count_tiers(self.tier),
            "shards": _shard_lines(self.layout, self.shard_of, self.ids, self.tier, self.version),
        }


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Norm of what recovery changes in the parameters."""

    value: float | None
    """None when unknown."""
    kind: str
    """"measured" against the current values, "estimated" from the last known distances, or "unknown"."""

    def to_json(self) -> dict[str, Any]:
        """`value` and `kind`."""
        return {"value": self.value, "kind": self.kind}


def plan_partial(
    ids: Ids,
    layout: Layout,
    shard_of: NDArray[np.int32],
    states: Mapping[int, ShardState],
    arena: Arena | None = None,
    *,
    survivors: str = "",
) -> Plan:
    """Take every partition of `ids` (ascending) from the freshest intact tier.

    arena: of the same layout; None when its copies are lost too.
    survivors: the commit of the whole state that all is of what is not restored, "" if that is not known: it decides
    whether the result is exact.

    Raises NoIntactCopy, naming partitions, when one has no copy anywhere.
    """
    stored = _stored(layout, states)[ids]
    tier = np.full(len(ids), STORE, dtype=np.int8)
    version = stored
    if arena is not None:
        near, memory = nearer(arena, ids, stored)
        tier[near] = MEMORY
        version = np.where(near, memory, stored)
    missing = ids[version < 0]
    if missing.size:
        damage = [d.reason for state in states.values() for d in state.damaged]
        raise no_copy(layout, missing, "has no intact copy" if damage else "was never saved", damage)
    step = only_step(version)
    whole = _whole_of(shard_of[ids], tier, states, arena)
    exact = bool(whole) and step is not None and (len(ids) == layout.partitions or whole == survivors)
    degraded = bool((_in_doubt(layout, states)[ids] & (tier == STORE)).any())
    return Plan(
        "partial",
        layout,
        shard_of,
        len(ids),
        ids,
        tier,
        version,
        dict(states),
        exact and not degraded,
        step,
        whole,
        degraded=degraded,
    )


def _whole_of(
    shards: NDArray[np.int32], tier: NDArray[np.int8], states: Mapping[int, ShardState], arena: Arena | None
) -> str:
    """The commit of the whole state that copies in these tiers, of these shards, are of; "" when they are of none."""
    found = {states[shard].whole for shard in distinct(shards[tier == STORE]).tolist()}
    if arena is not None and (tier == MEMORY).any():
        found.add(arena.whole)
    return found.pop() if len(found) == 1 else ""


def plan_rollback(
    store: Store,
    layout: Layout,
    shard_of: NDArray[np.int32],
    arena: Arena | None = None,
    *,
    lost: int | None = None,
    before: tuple[int, int, str] | None = None,
    until: tuple[int, int, str] | None = None,
    snapshot: Snapshot | None = None,
) -> Plan:
    """Take everything back to the newest whole state that every shard has sealed (by epoch, then step).

    lost: number of partitions that were lost, for the report; default all. before: only what is older than this one, as
    `Plan.sealed` says it. until: what was sealed later is damaged elsewhere. snapshot: this state and no other.

    Raises NoIntactCopy (kind "no-sealed-state") when there is none; LayoutMismatch.
    """
    shards = distinct(shard_of).tolist()
    damage: list[str] = []
    passed_over = until is not None
    for one in _before(before, _sealed_states(store, layout, shards, snapshot)):
        if until is not None and (one.epoch, one.step, one.whole) > until:
            continue
        step = one.step
        seqs = {shard: one.seqs[shard] for shard in shards}
        try:
            states = store.states(seqs, layout, at=seqs)
        except Corruption as error:  # collected long ago, or damaged
            damage.append(error.message)
            passed_over = True
            continue
        ids = np.arange(layout.partitions, dtype=np.int64)
        version = _stored(layout, states)
        top = int(version.max(initial=NEVER))
        # Differing versions mean that a record's segment was damaged and its partitions fell back; none at all that
        # the record has other members.
        if (version != top).any() or (top == NEVER and len(ids)):
            passed_over = True
            continue
        tier = np.full(len(ids), STORE, dtype=np.int8)
        whole = _whole_of(shard_of, tier, states, None) if len(ids) else one.whole
        # Copies of the same version may be of another state.
        if arena is not None and whole and arena.whole == whole:
            tier[arena.intact()] = MEMORY
        count = len(ids) if lost is None else lost
        name = snapshot.name if snapshot is not None else None
        return Plan(
            "rollback",
            layout,
            shard_of,
            count,
            ids,
            tier,
            version,
            states,
            bool(whole),
            step,
            whole,
            seqs=seqs,
            sealed=(one.epoch, one.step, one.whole),
            # The newest complete sealed state is never collected: if it cannot be read, it is damaged.
            degraded=passed_over,
            snapshot=name,
        )
    if snapshot is not None:
        raise NoIntactCopy(
            f"snapshot {snapshot.name!r} is damaged{': ' + damage[0] if damage else ''}",
            hint="nothing was changed; `scarctl verify` lists what is damaged",
            kind="no-sealed-state",
        )
    raise NoIntactCopy(
        "there is no older state that every shard sealed at the same step"
        if before is not None
        else "there is no state that every shard sealed at the same step",
        hint="recover the lost partitions only (--mode partial)",
        kind="no-sealed-state",
    )


def _sealed_states(
    store: Store, layout: Layout, shards: Sequence[int], snapshot: Snapshot | None
) -> Sequence[SealedSet]:
    """What a rollback may go back to, best first."""
    if snapshot is None and store.part is not None:
        return [sealed for sealed in complete_sets(store.again()) if set(shards) <= sealed.seqs.keys()]
    if snapshot is None:
        return sealed_sets(store.states(shards, layout).values())
    same = store.part is not None or snapshot.layout == layout.digest  # each rank has a layout of its own
    if not same or not set(shards) <= snapshot.seqs.keys():
        raise LayoutMismatch(
            f"snapshot {snapshot.name!r} is of another layout", hint="use the model that it was taken of"
        )
    return [SealedSet(snapshot.epoch, snapshot.step, snapshot.seqs, snapshot.whole)]


def _before(newer: tuple[int, int, str] | None, found: Sequence[SealedSet]) -> Sequence[SealedSet]:
    """What comes after a sealed set; two may have its epoch and step."""
    keys = [(one.epoch, one.step, one.whole) for one in found]
    if newer is None:
        return found
    if newer in keys:
        return found[keys.index(newer) + 1 :]
    return [one for one in found if (one.epoch, one.step) < newer[:2]]


def rows_of(layout: Layout, ids: Ids) -> slice | Ids:
    """What picks the rows of `ids` (ascending, of one group): a slice when they are adjacent."""
    if len(ids) and ids[-1] - ids[0] == len(ids) - 1:
        starts, stops = layout.row_ranges(ids[[0, -1]])
        return slice(int(starts[0]), int(stops[1]))
    return take_rows(*layout.row_ranges(ids))


def take_rows(starts: Ids, stops: Ids) -> slice | Ids:
    """What picks the rows of all ranges [start, stop), which ascend: a slice when they are adjacent."""
    if not len(starts) or (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1])) if len(starts) else slice(0, 0)
    lengths = stops - starts
    offsets = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets


def estimate(distance: NDArray[np.float64]) -> Perturbation:
    """The perturbation if partitions with these last known distances were lost now."""
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(distance))
    if not math.isfinite(norm):  # also where the squares of numbers are none any more
        return Perturbation(None, "unknown")
    return Perturbation(norm, "estimated")


def _stored(layout: Layout, states: Mapping[int, ShardState]) -> Ids:
    """Newest version in the store of every partition, `NEVER` where there is none."""
    result = np.full(layout.partitions, NEVER, dtype=np.int64)
    for state in states.values():
        result[state.ids] = state.version
    return result


def _in_doubt(layout: Layout, states: Mapping[int, ShardState]) -> NDArray[np.bool_]:
    """Partitions that may have had a newer copy in a segment whose list of partitions is damaged."""
    result = np.zeros(layout.partitions, dtype=bool)
    for state in states.values():
        result[state.ids] = state.doubt
    return result


def in_memory(arena: Arena) -> Ids:
    """Version of every intact copy in the arena, `NEVER` for the others."""
    return np.where(arena.intact(), arena.newest(), np.int64(NEVER))


def nearer(arena: Arena, ids: Ids, stored: Ids) -> tuple[NDArray[np.bool_], Ids]:
    """Which of `ids` the arena has at least as new as the versions `stored`, and the versions that it has of them."""
    memory = in_memory(arena)[ids]
    # Of two equal copies the one in memory is nearer.
    return (arena.lifted(memory) >= arena.lifted(stored)) & (memory >= 0), memory


def versions_of(state: ShardState, ids: Ids) -> Ids:
    at = state.find(ids)
    known = at >= 0
    result = np.full(len(ids), NEVER, dtype=np.int64)
    result[known] = state.version[at[known]]
    return result


def only_step(version: Ids) -> int | None:
    steps = distinct(step_of(version))
    return int(steps[0]) if len(steps) == 1 else None


def no_copy(layout: Layout, ids: Ids, what: str, problems: Sequence[str] = ()) -> NoIntactCopy:
    names = ", ".join(layout.name(int(i)) for i in ids[:_NAMES_SHOWN])
    more = f" and {len(ids) - _NAMES_SHOWN} more" if len(ids) > _NAMES_SHOWN else ""
    reason = f": {problems[-1]}" if problems else ""
    return NoIntactCopy(
        f"{names}{more} {what}{reason}",
        hint="nothing was changed; `scarctl verify` lists what is damaged, a rollback takes an older state",
    )


def count_tiers(tier: NDArray[np.int8]) -> dict[str, int]:
    counts = np.bincount(tier, minlength=len(TIERS))
    return {name: int(count) for name, count in zip(TIERS, counts, strict=True) if count}


def _shard_lines(
    layout: Layout, shard_of: NDArray[np.int32], ids: Ids, tier: NDArray[np.int8], version: Ids
) -> list[dict[str, Any]]:
    lines = []
    for shard in distinct(shard_of[ids]).tolist():
        mine = shard_of[ids] == shard
        steps = step_of(version[mine])
        lines.append(
            {
                "shard": shard,
                "partitions": int(mine.sum()),
                "bytes": int(layout.partition_bytes[ids[mine]].sum()),
                "tiers": count_tiers(tier[mine]),
                "oldest_step": int(steps.min()),
                "newest_step": int(steps.max()),
            }
        )
    return lines
