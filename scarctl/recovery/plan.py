"""Plan a recovery: find the freshest intact copy of every lost partition.

A `Plan` gives tier and version for every lost partition. The dry run prints it, and `scarctl.recovery.execute` carries
it out. Only lost partitions are restored; survivors keep their values (partial recovery: Qiao et al., ICML 2019,
section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.errors import Corruption, LayoutMismatch, NoIntactCopy
from scarctl.recovery.label import NO_COMMIT, label_of
from scarctl.state.label import Label, Labelled
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER, step_of
from scarctl.store import SealedSet, ShardState, Snapshot, Store, complete_sets, sealed_sets
from scarctl.store.snapshot import lost_seals
from scarctl.util.arrays import Ids, distinct
from scarctl.util.document import Document

TIERS = ("live", "memory", "peer", "store")
"""Places of copies, freshest first: a surviving process, this host's memory, another host's memory, the store."""
MEMORY = 1
PEER = 2
STORE = 3

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Plan(Labelled):
    """The partitions to restore, and the source of each. Arrays are parallel to `ids`."""

    mode: str
    """"partial", or "rollback": restore everything to the newest state that all shards sealed at one step."""
    layout: Layout
    shard_of: NDArray[np.int32]
    """Shard of every partition of the layout, for the report."""
    lost: int
    """Number of partitions that were named as lost."""
    ids: Ids
    """Partitions to restore, ascending."""
    tier: NDArray[np.int8]
    """Index into `TIERS`."""
    version: Ids
    state: ShardState
    """State of the lane from which copies in the store are read."""
    whole: str
    """Identity of the commit of the whole state that contains all copies (`Record.whole`); "" if no single one does."""
    label: Label = field(default_factory=Label)
    """The label of the recovered whole state, with the steps of the copies."""
    seq: int | None = None
    """Rollback: the sealed record to restore. If the lane has no partitions, it may be the newest record."""
    sealed: tuple[int, int, str] | None = None
    """Rollback: epoch, step and identity of the sealed state, the same on all ranks."""
    degraded: bool = False
    """Whether a newer acknowledged version exists without an intact copy."""
    snapshot: str | None = None
    """Rollback: name of the snapshot to restore, if it is one."""
    before: int | None = None
    """The newest step of a copy that may be taken; None: of any step."""
    spare: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The partitions, ascending, whose copy in memory is the older one, of the slot that is not current."""
    decoded: NDArray[np.bool_] | None = None
    """Which copies were read from encoded ones, where that differs from the plan's state; None: see `encoded`."""

    @property
    def nbytes(self) -> int:
        return int(self.layout.partition_bytes[self.ids].sum())

    @property
    def step(self) -> int | None:
        """Step of all copies; None when steps are mixed."""
        return self.label.step

    @property
    def doubts(self) -> list[str]:
        """Why newer copies than those of the plan may be lost: the damage that makes it `degraded`."""
        if not self.degraded:
            return []
        return [damage.reason for damage in self.state.damaged]

    @property
    def encoded(self) -> int:
        """Number of copies that come from encoded ones in the store, which have fewer bits."""
        if self.decoded is not None:
            return int(self.decoded.sum())
        at = self.state.find(self.ids[self.tier == STORE])
        return int(np.count_nonzero(self.state.encoding(at[at >= 0])))

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a report that are known before the recovery."""
        return {
            "mode": self.mode,
            **self.label.to_json(),
            "degraded": self.degraded,
            "step": self.step,
            "snapshot": self.snapshot,
            "lost_partitions": self.lost,
            "restored_partitions": len(self.ids),
            "bytes": self.nbytes,
            "tiers": count_tiers(self.tier),
            "encoded_partitions": self.encoded,
            "shards": _shard_lines(self.layout, self.shard_of, self.ids, self.tier, self.version),
        }


@dataclass(frozen=True, slots=True)
class Perturbation(Document):
    """Norm of the change that a recovery makes to the parameters."""

    value: float | None
    """None when unknown."""
    kind: Literal["measured", "estimated", "unknown"]
    """"measured" against the current values, or "estimated" from the last known distances."""


def plan_partial(
    ids: Ids,
    layout: Layout,
    shard_of: NDArray[np.int32],
    state: ShardState,
    arena: Arena | None = None,
    *,
    survivors: str = "",
) -> Plan:
    """Plan to restore every partition of `ids` (ascending) from the freshest intact tier.

    arena: arena of the same layout; None if its copies are lost too.
    survivors: identity of the commit of the whole state that contains all surviving values; "" if unknown. It decides
    whether the result is of one commit.

    Raises NoIntactCopy, naming the partitions, if any has no copy.
    """
    stored = versions_of(state, ids)
    tier = np.full(len(ids), STORE, dtype=np.int8)
    version = stored
    if arena is not None:
        near, memory = nearer(arena, ids, stored)
        tier[near] = MEMORY
        version = np.where(near, memory, stored)
    missing = ids[version < 0]
    if missing.size:
        damage = [one.reason for one in state.damaged]
        raise no_copy("no intact copy of" if damage else "never saved:", layout, missing, damage)
    whole = _whole_of(tier, state, arena)
    of_one = bool(whole) and (len(ids) == layout.partitions or whole == survivors)
    degraded = bool(state.doubt[state.find(ids[tier == STORE])].any())
    plan = Plan("partial", layout, shard_of, len(ids), ids, tier, version, state, whole, degraded=degraded)
    return replace(plan, label=label_of(plan, of_one=of_one and not degraded))


def _whole_of(tier: NDArray[np.int8], state: ShardState, arena: Arena | None) -> str:
    """Return the commit of the whole state that contains the copies in these tiers; "" if none does."""
    found = {state.whole} if (tier == STORE).any() else set[str]()
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
    """Plan to restore everything to the newest whole state that every shard has sealed (by epoch, then step).

    lost: number of lost partitions, for the report; default all. before: consider only states older than this one
    (`Plan.sealed`). until: newest state to consider, because newer ones are damaged on other ranks. snapshot: restore
    this state and no other.

    Raises NoIntactCopy (kind "no-sealed-state") if no intact sealed state exists; LayoutMismatch.
    """
    damage: list[str] = []
    found, lost_newer = _sealed_states(store, layout, snapshot)
    passed_over = lost_newer or until is not None
    for one in _before(before, found):
        if until is not None and (one.epoch, one.step, one.whole) > until:
            continue
        try:
            plan = plan_sealed(store, layout, shard_of, one, arena, lost=lost)
        except NoIntactCopy as error:
            damage.append(error.message)
            passed_over = True
            continue
        # The newest complete sealed state is never collected: if it cannot be read, it is damaged.
        return replace(plan, degraded=passed_over, snapshot=None if snapshot is None else snapshot.name)
    if snapshot is not None:
        raise NoIntactCopy(
            f"snapshot {snapshot.name!r} is damaged{': ' + damage[0] if damage else ''}",
            hint="nothing was changed; list the damage with `scarctl verify`",
            kind="no-sealed-state",
        )
    raise NoIntactCopy(
        f"the store has no {'older ' if before is not None else ''}state that every shard sealed at the same step",
        hint="nothing was changed; --mode partial restores parts that are intact, by name",
        kind="no-sealed-state",
    )


def plan_sealed(
    store: Store,
    layout: Layout,
    shard_of: NDArray[np.int32],
    sealed: SealedSet,
    arena: Arena | None = None,
    *,
    lost: int | None = None,
) -> Plan:
    """Plan to restore everything to one sealed state. lost: see `plan_rollback`.

    Raises NoIntactCopy (kind "no-sealed-state") if the store no longer has all of that state.
    """
    lane = store.lane
    try:
        if layout.partitions:
            seq = sealed.seqs[lane]
        else:  # such a rank seals its extras alone, and the set does not name its record
            newest = store.state(lane, layout, around=True)
            seq = next((one.seq for one in newest.sealed if one.whole == sealed.whole), newest.seq)
        state = store.state(lane, layout, at=seq, around=True)
    except Corruption as error:  # collected or damaged
        raise NoIntactCopy(error.message, hint=error.hint, kind="no-sealed-state") from error
    ids = np.arange(layout.partitions, dtype=np.int64)
    version = versions_of(state, ids)
    top = int(version.max(initial=NEVER))
    # If versions differ or are in doubt, a record or its segment was damaged, and partitions fell back to older copies.
    # If no copy exists, the record has other members.
    if (version != top).any() or state.doubt.any() or (top == NEVER and len(ids)):
        reasons = [damage.reason for damage in state.damaged]
        raise NoIntactCopy(
            reasons[0] if reasons else f"{store.where}: the state of step {sealed.step} is not complete",
            kind="no-sealed-state",
        )
    tier = np.full(len(ids), STORE, dtype=np.int8)
    whole = state.whole if len(ids) else sealed.whole
    # Copies of the same version may belong to another state.
    if arena is not None and whole and arena.whole == whole:
        tier[arena.intact()] = MEMORY
    return Plan(
        "rollback",
        layout,
        shard_of,
        len(ids) if lost is None else lost,
        ids,
        tier,
        version,
        state,
        whole,
        Label(sealed.step, sealed.step, () if whole else (NO_COMMIT,)),
        seq=seq,
        sealed=(sealed.epoch, sealed.step, sealed.whole),
    )


def _sealed_states(
    store: Store, layout: Layout, snapshot: Snapshot | None
) -> tuple[Sequence[SealedSet], bool]:
    """Return the states that a rollback may restore, best first, and whether damage hides newer ones."""
    if snapshot is None and store.part is not None:
        sets = complete_sets(store.again(), of=store.part.shard)
        return [one for one in sets if not layout.partitions or store.lane in one.places], False
    if snapshot is None:
        states = [store.state(store.lane, layout)]
        sets = sealed_sets(states)
        return sets, bool(lost_seals(states, sets))
    check_snapshot(store, snapshot, layout)
    return [snapshot], False


def check_snapshot(store: Store, snapshot: Snapshot, layout: Layout) -> None:
    """Raise LayoutMismatch if the snapshot lacks this lane, or is a single process's with another layout."""
    lacks = bool(layout.partitions) and store.lane not in snapshot.places
    if lacks and store.part is not None:
        raise LayoutMismatch(
            f"snapshot {snapshot.name!r} does not contain shard {store.lane}",
            hint="nothing was changed; use a snapshot of this rank or member",
        )
    if lacks or (store.part is None and snapshot.layout != layout.digest):
        raise LayoutMismatch(
            f"snapshot {snapshot.name!r} has another layout than the model",
            hint="nothing was changed; use the model that the snapshot was taken from",
        )


def _before(newer: tuple[int, int, str] | None, found: Sequence[SealedSet]) -> Sequence[SealedSet]:
    """Return the sealed sets after `newer`, of which two may share epoch and step."""
    keys = [(one.epoch, one.step, one.whole) for one in found]
    if newer is None:
        return found
    if newer in keys:
        return found[keys.index(newer) + 1 :]
    return [one for one in found if (one.epoch, one.step) < newer[:2]]


def estimate(distance: NDArray[np.float64]) -> Perturbation:
    """Estimate the perturbation if partitions with these last known distances, of shape (n,), were lost now."""
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(distance))
    if not math.isfinite(norm):  # even if a square overflows
        return Perturbation(None, "unknown")
    return Perturbation(norm, "estimated")


def in_memory(arena: Arena) -> Ids:
    """Return the version of every intact copy in the arena: int64 (partitions,), `NEVER` for the others."""
    return np.where(arena.intact(), arena.newest(), np.int64(NEVER))


def nearer(arena: Arena, ids: Ids, stored: Ids) -> tuple[NDArray[np.bool_], Ids]:
    """Mark the `ids` whose copy in the arena is at least as new as `stored`; return the arena's versions as well."""
    memory = in_memory(arena)[ids]
    # If both are equally new, the copy in memory is faster to reach.
    return (arena.lifted(memory) >= arena.lifted(stored)) & (memory >= 0), memory


def versions_of(state: ShardState, ids: Ids) -> Ids:
    """Return the versions of a state's copies: int64 of the shape of `ids`, `NEVER` for those never saved."""
    at = state.find(ids)
    known = at >= 0
    result = np.full(len(ids), NEVER, dtype=np.int64)
    result[known] = state.version[at[known]]
    return result


def no_copy(what: str, layout: Layout, ids: Ids, problems: Sequence[str]) -> NoIntactCopy:
    names = ", ".join(layout.name(int(i)) for i in ids[:_NAMES_SHOWN])
    more = f" and {len(ids) - _NAMES_SHOWN} more" if len(ids) > _NAMES_SHOWN else ""
    reason = f": {problems[-1]}" if problems else ""
    return NoIntactCopy(
        f"{what} {names}{more}{reason}",
        hint="nothing was changed; `scarctl verify` lists all damage. Name the other parts to restore them alone, "
        "or take an older whole state with --mode rollback, if one is intact",
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
