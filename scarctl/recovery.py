"""Partial recovery: what was lost, where its freshest intact copy is, and putting it back.

A `Plan` says for every lost partition from which tier which version comes. The dry run prints it, `execute`
carries it out, the `Report` is it plus what happened. Only what was lost is restored; survivors stay where
they are (Qiao et al., ICML 2019, section 4.1: partial recovery).
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.layout import Layout
from scarctl.store import ShardState, Store
from scarctl.version import NEVER, step_of

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Lost = str | int | Iterable[str | int]

TIERS = ("live", "memory", "peer", "store")
"""Where a copy is, freshest first: a surviving process, this host's memory, another host's, the store."""
MEMORY = 1
STORE = 3

_NAMES_SHOWN = 5
_BATCH_BYTES = 64 << 20


class Sink(Protocol):
    """Where restored partitions go."""

    arena: Arena | None
    """The arena, when that is what is written to: its own copies need no writing."""

    def overwrites(self, ids: Ids, versions: Ids) -> bool:
        """Whether writing these would destroy newer copies: then all are checked before one is written."""

    def put(
        self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]
    ) -> NDArray[np.float64] | None:
        """Write partitions `ids` (ascending, of one group): per tensor uint8 of shape (rows, bytes per row).

        Returns the squared norm by which each partition's parameter changed, NaN where that cannot be known;
        or None.
        """


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
    """Afterwards the whole state is of one step."""
    step: int | None
    """The step of everything restored, None when steps are mixed."""
    seqs: Mapping[int, int] = field(default_factory=dict)
    """Rollback: per shard the sealed record that is gone back to."""
    degraded: bool = False
    """A newer acknowledged version exists, but no intact copy of it."""

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
            "lost_partitions": self.lost,
            "restored_partitions": len(self.ids),
            "bytes": self.nbytes,
            "tiers": _count_tiers(self.tier),
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


@dataclass(frozen=True, slots=True)
class Report:
    """A plan that was carried out."""

    plan: Plan
    """As it was carried out, with the tiers and versions that copies really came from."""
    perturbation: Perturbation
    seconds: float
    problems: tuple[str, ...] = ()
    """Copies that were found damaged, for people."""
    output: str | None = None
    """The file that was written."""

    @property
    def mode(self) -> str:
        return self.plan.mode

    @property
    def exact(self) -> bool:
        return self.plan.exact

    @property
    def degraded(self) -> bool:
        return self.plan.degraded

    @property
    def step(self) -> int | None:
        return self.plan.step

    @property
    def lost_partitions(self) -> int:
        return self.plan.lost

    @property
    def restored_partitions(self) -> int:
        return len(self.plan.ids)

    @property
    def bytes(self) -> int:
        return self.plan.nbytes

    @property
    def tiers(self) -> dict[str, int]:
        return _count_tiers(self.plan.tier)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.plan.to_json(),
            "perturbation": self.perturbation.to_json(),
            "output": self.output,
            "seconds": round(self.seconds, 6),
        }


def plan_partial(
    ids: Ids,
    layout: Layout,
    shard_of: NDArray[np.int32],
    states: Mapping[int, ShardState],
    arena: Arena | None = None,
    *,
    survivors_step: int | None = None,
) -> Plan:
    """Take every partition of `ids` (ascending) from the freshest intact tier.

    arena: of the same layout; None when its copies are lost too.
    survivors_step: the step of what is not restored, if that is one step: it decides whether the result is
    exact.

    Raises NoIntactCopy, naming partitions, when one has no copy anywhere.
    """
    stored = _stored(layout, states)[ids]
    tier = np.full(len(ids), STORE, dtype=np.int8)
    version = stored
    if arena is not None:
        memory = _in_memory(arena)[ids]
        # Of two equal copies the one in memory is nearer.
        near = (memory >= stored) & (memory >= 0)
        tier[near] = MEMORY
        version = np.maximum(stored, memory)
    missing = ids[version < 0]
    if missing.size:
        damage = [d.reason for state in states.values() for d in state.damaged]
        raise _no_copy(layout, missing, "has no intact copy" if damage else "was never saved", damage)
    step = _only_step(version)
    exact = step is not None and (len(ids) == layout.partitions or step == survivors_step)
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
        degraded=degraded,
    )


def plan_rollback(
    store: Store,
    layout: Layout,
    shard_of: NDArray[np.int32],
    arena: Arena | None = None,
    *,
    lost: int | None = None,
    before: int | None = None,
) -> Plan:
    """Take everything back to the newest step at which every shard was sealed (by version: epoch, then step).

    lost: number of partitions that were lost, for the report; default all. before: only versions below this
    one.

    Raises NoIntactCopy (kind "no-sealed-state") when there is none.
    """
    shards = np.unique(shard_of).tolist()
    sealed: dict[int, dict[tuple[int, int], int]] = {}
    for shard in shards:
        sealed[shard] = {(epoch, step): seq for seq, epoch, step in store.state(shard, layout).sealed}
    common = set.intersection(*(set(of) for of in sealed.values())) if sealed else set()
    for epoch, step in sorted(common, reverse=True):
        seqs = {shard: sealed[shard][epoch, step] for shard in shards}
        states = {shard: store.state(shard, layout, at=seq) for shard, seq in seqs.items()}
        ids = np.arange(layout.partitions, dtype=np.int64)
        version = _stored(layout, states)
        top = int(version.max(initial=NEVER))
        # Differing versions mean that a record's segment was damaged and its partitions fell back.
        if (version != top).any() or (before is not None and top >= before):
            continue
        tier = np.full(len(ids), STORE, dtype=np.int8)
        if arena is not None:
            tier[_in_memory(arena) == version] = MEMORY
        count = len(ids) if lost is None else lost
        return Plan("rollback", layout, shard_of, count, ids, tier, version, states, True, step, seqs=seqs)
    raise NoIntactCopy(
        "there is no older state that every shard sealed at the same step"
        if before is not None
        else "there is no state that every shard sealed at the same step",
        hint="recover the lost partitions only (--mode partial)",
        kind="no-sealed-state",
    )


def execute(plan: Plan, store: Store | None, arena: Arena | None, sink: Sink) -> Report:
    """Put the plan's partitions into `sink`, every one verified.

    A damaged copy is replaced by the next best: of memory and older versions in the store, the newer one; a
    rollback goes to the next older sealed state. The report is then `degraded`.

    arena: source of the memory tier and of the last known distances. store: needed when the plan reads from
    it.

    Raises NoIntactCopy when a partition has no intact copy at all; AccessDenied, Unavailable. Nothing was
    destroyed then: a sink that overwrites newer copies is written to only after everything was read and
    verified.
    """
    started = time.perf_counter()
    # The sink may be the arena itself, and forgets the distances of what it takes in.
    distance = None if arena is None else np.array(arena.distance)
    while True:
        run = _Run(plan, store, arena)
        try:
            if sink.overwrites(plan.ids, plan.version):
                for _ in run.pieces():
                    pass
                run = _Run(run.outcome(), store, arena, run.problems)
            squared = run.deliver(sink)
        except _NextSealedState as damage:
            assert store is not None
            older = plan_rollback(
                store, plan.layout, plan.shard_of, arena, lost=plan.lost, before=int(plan.version.max())
            )
            plan = replace(older, degraded=True)
            run.problems.append(damage.reason)
            continue
        done = run.outcome()
        return Report(
            done,
            _perturbation(done.ids, squared, distance),
            time.perf_counter() - started,
            tuple(dict.fromkeys(run.problems)),
        )


@dataclass(slots=True)
class _Piece:
    tier: int
    group: int
    ids: Ids
    versions: Ids
    tensors: Sequence[Bytes]


class _NextSealedState(Exception):
    """A copy of the sealed state is damaged."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Run:
    """One pass over a plan: yields verified pieces, and keeps account of where they really came from."""

    def __init__(
        self, plan: Plan, store: Store | None, arena: Arena | None, problems: Sequence[str] = ()
    ) -> None:
        self.plan = plan
        self.store = store
        self.arena = arena
        self.tier = plan.tier.copy()
        self.version = plan.version.copy()
        self.problems = list(problems)
        self.fell_back = False
        self.skip_memory = False

    def deliver(self, sink: Sink) -> NDArray[np.float64]:
        """Write every piece; returns the squared changes, parallel to the plan's ids, NaN where unknown."""
        squared = np.full(len(self.plan.ids), np.nan)
        # What the arena has needs no writing when it is what is written to.
        self.skip_memory = sink.arena is not None and sink.arena is self.arena
        for piece in self.pieces():
            changes = sink.put(piece.group, piece.ids, piece.versions, piece.tensors)
            if changes is not None:
                squared[np.searchsorted(self.plan.ids, piece.ids)] = changes
        return squared

    def outcome(self) -> Plan:
        """The plan as it was carried out."""
        if not self.fell_back:
            return self.plan
        whole = len(self.plan.ids) == self.plan.layout.partitions
        step = _only_step(self.version)
        return replace(
            self.plan,
            tier=self.tier,
            version=self.version,
            degraded=True,
            step=step,
            exact=self.plan.exact and whole and step is not None,
        )

    def pieces(self) -> Iterator[_Piece]:
        """Every partition of the plan once; with `skip_memory` those that come from the store."""
        plan = self.plan
        near = plan.tier == MEMORY
        yield from self._from_memory(plan.ids[near], plan.version[near])
        far = plan.ids[plan.tier == STORE]
        shard_of = plan.shard_of[far]
        for shard in np.unique(shard_of).tolist():
            yield from self._from_store(shard, far[shard_of == shard])

    def _from_memory(self, ids: Ids, versions: Ids) -> Iterator[_Piece]:
        arena, layout = self.arena, self.plan.layout
        if not ids.size or self.skip_memory:
            return
        assert arena is not None
        bounds = np.searchsorted(ids, layout.base)
        for g, group in enumerate(layout.groups):
            step = max(1, _BATCH_BYTES // max(1, group.rows_per_partition * group.row_bytes))
            for first in range(int(bounds[g]), int(bounds[g + 1]), step):
                part = slice(first, min(first + step, int(bounds[g + 1])))
                rows = take_rows(*layout.row_ranges(ids[part]))
                tensors = [arena.rows(g, t)[rows] for t in range(len(group.tensors))]
                yield _Piece(MEMORY, g, ids[part], versions[part], tensors)

    def _from_store(self, shard: int, ids: Ids) -> Iterator[_Piece]:
        assert self.store is not None
        state: ShardState | None = self.plan.states[shard]
        while ids.size:
            if state is None:
                raise _no_copy(self.plan.layout, ids, "has no intact copy", self.problems)
            corrupt: list[tuple[Ids, str]] = []
            versions = _versions_of(state, ids)
            found = versions >= 0
            for batch in self.store.read(state, ids[found], corrupt=corrupt) if found.any() else ():
                yield _Piece(STORE, batch.group, batch.ids, _versions_of(state, batch.ids), batch.tensors)
            left = [ids[~found], *(bad for bad, _ in corrupt)]
            self.problems += [reason for _, reason in corrupt]
            ids = np.unique(np.concatenate(left))
            if not ids.size:
                return
            if self.plan.mode == "rollback":
                raise _NextSealedState(self.problems[-1])
            self.fell_back = True
            state = self.store.older(shard, ids, state)
            ids = yield from self._nearer(ids, state)
            if state is not None:
                self._settle(ids, STORE, _versions_of(state, ids))

    def _nearer(self, ids: Ids, older: ShardState | None) -> Generator[_Piece, None, Ids]:
        """Yield those of `ids` that memory has at least as new as `older` has; return the rest."""
        if self.arena is None:
            return ids
        memory = _in_memory(self.arena)[ids]
        stored = _versions_of(older, ids) if older is not None else np.full(len(ids), NEVER)
        near = (memory >= stored) & (memory >= 0)
        self._settle(ids[near], MEMORY, memory[near])
        yield from self._from_memory(ids[near], memory[near])
        return ids[~near]

    def _settle(self, ids: Ids, tier: int, versions: Ids) -> None:
        at = np.searchsorted(self.plan.ids, ids)
        self.tier[at] = tier
        self.version[at] = versions


def take_rows(starts: Ids, stops: Ids) -> slice | Ids:
    """What picks the rows of all ranges [start, stop), which ascend: a slice when they are adjacent."""
    if not len(starts) or (starts[1:] == stops[:-1]).all():
        return slice(int(starts[0]), int(stops[-1])) if len(starts) else slice(0, 0)
    lengths = stops - starts
    offsets = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets


def estimate(distance: NDArray[np.float64]) -> Perturbation:
    """The perturbation if partitions with these last known distances were lost now."""
    if not np.isfinite(distance).all():
        return Perturbation(None, "unknown")
    return Perturbation(float(np.linalg.norm(distance)), "estimated")


def _perturbation(
    ids: Ids, squared: NDArray[np.float64], distance: NDArray[np.float64] | None
) -> Perturbation:
    unknown = np.isnan(squared)
    if unknown.any():
        if distance is None or not np.isfinite(distance[ids[unknown]]).all():
            return Perturbation(None, "unknown")
        squared = squared.copy()
        squared[unknown] = distance[ids[unknown]] ** 2
    return Perturbation(math.sqrt(float(squared.sum())), "estimated" if unknown.any() else "measured")


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


def _in_memory(arena: Arena) -> Ids:
    """Version of every intact copy in the arena, `NEVER` for the others."""
    return np.where(arena.intact(), arena.newest(), np.int64(NEVER))


def _versions_of(state: ShardState, ids: Ids) -> Ids:
    at = state.find(ids)
    known = at >= 0
    result = np.full(len(ids), NEVER, dtype=np.int64)
    result[known] = state.version[at[known]]
    return result


def _only_step(version: Ids) -> int | None:
    steps = np.unique(step_of(version))
    return int(steps[0]) if len(steps) == 1 else None


def _no_copy(layout: Layout, ids: Ids, what: str, problems: Sequence[str] = ()) -> NoIntactCopy:
    names = ", ".join(layout.name(int(i)) for i in ids[:_NAMES_SHOWN])
    more = f" and {len(ids) - _NAMES_SHOWN} more" if len(ids) > _NAMES_SHOWN else ""
    reason = f": {problems[-1]}" if problems else ""
    return NoIntactCopy(
        f"{names}{more} {what}{reason}",
        hint="nothing was changed; `scarctl verify` lists what is damaged, a rollback takes an older state",
    )


def _count_tiers(tier: NDArray[np.int8]) -> dict[str, int]:
    counts = np.bincount(tier, minlength=len(TIERS))
    return {name: int(count) for name, count in zip(TIERS, counts, strict=True) if count}


def _shard_lines(
    layout: Layout, shard_of: NDArray[np.int32], ids: Ids, tier: NDArray[np.int8], version: Ids
) -> list[dict[str, Any]]:
    lines = []
    for shard in np.unique(shard_of[ids]).tolist():
        mine = shard_of[ids] == shard
        steps = step_of(version[mine])
        lines.append(
            {
                "shard": shard,
                "partitions": int(mine.sum()),
                "bytes": int(layout.partition_bytes[ids[mine]].sum()),
                "tiers": _count_tiers(tier[mine]),
                "oldest_step": int(steps.min()),
                "newest_step": int(steps.max()),
            }
        )
    return lines
