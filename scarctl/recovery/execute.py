"""Carry out a recovery plan: verify every copy from the store, and replace damaged ones by the next best.

The result is a `Report`: the executed plan, and the changes that it made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.distances import from_memory, from_store, with_errors
from scarctl.arena.extras import carry_extras
from scarctl.errors import NoIntactCopy
from scarctl.recovery.label import label_of
from scarctl.recovery.memory import differing, fault
from scarctl.recovery.plan import (
    MEMORY,
    STORE,
    Perturbation,
    Plan,
    nearer,
    no_copy,
    plan_rollback,
    versions_of,
)
from scarctl.recovery.report import Report
from scarctl.state.layout import rows_of
from scarctl.state.version import NEVER, epoch_of, pack, step_of
from scarctl.store import ShardState, Store
from scarctl.store.read import Room
from scarctl.store.saved import last_saved
from scarctl.util.arrays import Bytes, Ids, distinct, places, union

_BATCH_BYTES = 64 << 20


class Sink(Protocol):
    """The destination of restored partitions. What is there stays until all of them are written."""

    arena: Arena | None
    """The arena, if it is the destination: its own copies need no writing."""

    def room(self, group: int, ids: Ids) -> Sequence[Bytes | None] | None:
        """Return buffers for reading copies of partitions `ids` before they are verified: `scarctl.store.read.Room`.

        Their present content may be lost. Until `put`, nothing may take the new content for a copy.
        """

    def put(
        self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]
    ) -> NDArray[np.float64] | None:
        """Write partitions `ids` (ascending, of one group): per tensor uint8 of shape (rows, bytes per row).

        Returns the squared norm of each partition's change, of its parameter: float64 of the shape of `ids`, NaN where
        unknown. Returns None if all are unknown.
        """


def execute(plan: Plan, store: Store | None, arena: Arena | None, sink: Sink) -> Report:
    """Write the plan's partitions to `sink`. Those from the store are verified.

    Copies in memory are verified where the plan has a state of the store with the same copy; where their bytes differ,
    that copy is taken.

    A damaged copy is replaced by the next best: the newer of the copy in memory and an older version in the store. A
    rollback takes the next older sealed state instead. The report is then `degraded`.

    arena: source of the memory tier and of the last known distances. store: required if the plan reads from it.

    Raises NoIntactCopy when a partition has no intact copy at all; AccessDenied, Unavailable.
    """
    started = time.perf_counter()
    problems: tuple[str, ...] = ()
    while True:
        try:
            report = execute_once(plan, store, arena, sink)
        except SealedStateDamaged as damage:
            assert store is not None
            if plan.snapshot is not None:
                raise NoIntactCopy(
                    f"snapshot {plan.snapshot!r} is damaged: {damage.message}",
                    hint="no copy was changed; list the damage with `scarctl verify`",
                    kind="no-sealed-state",
                ) from None
            older = plan_rollback(
                store, plan.layout, plan.shard_of, arena, lost=plan.lost, before=plan.sealed
            )
            plan = replace(older, degraded=True)
            problems += (damage.message,)
            continue
        seconds = time.perf_counter() - started
        return replace(report, seconds=seconds, problems=tuple(dict.fromkeys(problems + report.problems)))


def execute_once(plan: Plan, store: Store | None, arena: Arena | None, sink: Sink) -> Report:
    """Execute like `execute`, but raise SealedStateDamaged if a copy of the sealed state is damaged."""
    started = time.perf_counter()
    # The sink may be the arena itself, and replaces the distances of what it takes in.
    distance = None if arena is None else last_distances(plan, arena)
    run = _Run(plan, store, arena)
    squared = run.deliver(sink)
    done = run.outcome()
    return Report(
        done,
        _perturbation(squared, distance),
        time.perf_counter() - started,
        tuple(dict.fromkeys(run.problems)),
        run.memory_fault,
        saved_at=last_saved(store, [plan.state.shard])
        if store is not None and (done.tier == STORE).any()
        else None,
    )


def last_distances(plan: Plan, arena: Arena) -> NDArray[np.float64]:
    """Return the last known distances of the lost values from the copies of `plan`: float64 of the shape of its ids."""
    far = with_errors(from_store(arena), arena.encoding_error)[plan.ids]
    return np.where(plan.tier == STORE, far, from_memory(arena.newest())[plan.ids])


class SealedStateDamaged(NoIntactCopy):
    """A copy of the sealed state that a rollback restores is damaged. The message names the copy."""

    kind = "no-sealed-state"


@dataclass(slots=True)
class _Piece:
    tier: int
    group: int
    ids: Ids
    versions: Ids
    tensors: Sequence[Bytes]


class _Run:
    """One pass over a plan: yields verified pieces, and records their actual sources."""

    def __init__(self, plan: Plan, store: Store | None, arena: Arena | None) -> None:
        self.plan = plan
        self.store = store
        self.arena = arena
        self.tier = plan.tier.copy()
        self.version = plan.version.copy()
        self.decoded = np.zeros(len(plan.ids), dtype=bool)
        self.problems: list[str] = plan.doubts
        self.memory_fault = ""
        self.changed = np.zeros(len(plan.ids), dtype=bool)
        """Marks the partitions whose copies in memory have other bytes than the same copies in the store."""
        self.fell_back = self.moved_on = False
        self.same = True
        """Whether every substituted copy has the bytes of the planned one, or belongs to the same whole state."""
        self.skip_memory = False
        self.room: Room | None = None
        """Provides buffers for copies from the store; None: new memory is used."""

    def deliver(self, sink: Sink) -> NDArray[np.float64]:
        """Write every piece; return the squared changes, float64 parallel to the plan's ids, NaN where unknown."""
        squared = np.full(len(self.plan.ids), np.nan)
        # If the arena is the destination, its own copies need no writing.
        self.skip_memory = sink.arena is not None and sink.arena is self.arena
        self.room = sink.room
        # Closed at once after a failure: until then threads may be reading into the sink's room.
        with closing(self.pieces()) as pieces:
            for piece in pieces:
                changes = sink.put(piece.group, piece.ids, piece.versions, piece.tensors)
                if changes is not None:
                    squared[places(self.plan.ids, piece.ids)] = changes
        return squared

    def outcome(self) -> Plan:
        """Return the executed plan."""
        if not self.fell_back and not self.moved_on and not self.changed.any():
            return self.plan
        done = replace(
            self.plan,
            tier=self.tier,
            version=self.version,
            decoded=self.decoded,
            degraded=self.plan.degraded or self.fell_back,
            whole=self.plan.whole if self.same else "",
        )
        return replace(done, label=label_of(done, of_one=self.plan.label.of_one and self.same))

    def pieces(self) -> Generator[_Piece, None, None]:
        """Yield every partition of the plan once; with `skip_memory` only those from the store."""
        plan = self.plan
        self._compare()
        near = self.tier == MEMORY
        yield from self._from_memory(plan.ids[near], plan.version[near])
        yield from self._from_store(plan.ids[self.tier == STORE])

    def _compare(self) -> None:
        """Take the store's copies instead of those in memory whose bytes differ from them. The state is the same."""
        arena, near = self.arena, self.plan.ids[self.plan.tier == MEMORY]
        if arena is None or not near.size:
            return
        older = np.isin(near, self.plan.spare, assume_unique=True)
        bad = union(
            differing(arena, arena.slot, near[~older], self.plan.state),
            differing(arena, arena.spare, near[older], self.plan.state),
        )
        self._settle(bad, STORE, versions_of(self.plan.state, bad))
        if bad.size:
            self.changed[places(self.plan.ids, bad)] = True
            self.memory_fault = fault(arena, bad)
            self.problems.append(self.memory_fault)

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
                rows = rows_of(layout, g, ids[part])
                tensors = [arena.rows(g, t)[rows] for t in range(len(group.tensors))]
                yield _Piece(MEMORY, g, ids[part], versions[part], tensors)

    def _from_store(self, ids: Ids) -> Iterator[_Piece]:
        state: ShardState | None = self.plan.state
        while ids.size:
            assert self.store is not None
            if state is None:
                raise no_copy("no intact copy of", self.plan.layout, ids, self.problems)
            corrupt: list[tuple[Ids, str]] = []
            versions = versions_of(state, ids)
            found = versions >= 0
            wanted = ids[found]
            for batch in (
                self.store.read(state, wanted, corrupt=corrupt, room=self.room) if wanted.size else ()
            ):
                # If a writer collects garbage concurrently, a newer copy may have replaced the planned one.
                self._note(batch.ids, batch.versions, batch.encoded)
                yield _Piece(STORE, batch.group, batch.ids, batch.versions, batch.tensors)
            left = [ids[~found], *(bad for bad, _ in corrupt)]
            self.problems += [reason for _, reason in corrupt]
            ids = distinct(np.concatenate(left))
            if not ids.size:
                return
            if self.plan.mode == "rollback":
                raise SealedStateDamaged(self.problems[-1])
            from scarctl.store.older import older_copies  # damage is rare

            self.fell_back = True
            sums = _checksums(state, ids)
            state = older_copies(self.store.log(state.shard), ids, state)
            far = yield from self._nearer(ids, state)
            if state is not None:
                self._settle(far, STORE, versions_of(state, far))
                kept = np.isin(ids, far, assume_unique=True)
                self.same &= bool((_checksums(state, far) == sums[kept]).all())
            ids = far

    def _nearer(self, ids: Ids, older: ShardState | None) -> Generator[_Piece, None, Ids]:
        """Yield the `ids` whose copy in memory is at least as new as in `older`; return the rest."""
        if self.arena is None:
            return ids
        stored = versions_of(older, ids) if older is not None else np.full(len(ids), NEVER)
        near, memory = nearer(self.arena, ids, stored)
        near &= ~self.changed[places(self.plan.ids, ids)]
        if self.plan.before is not None:
            near &= step_of(self.arena.version[ids]) <= self.plan.before
        self._settle(ids[near], MEMORY, memory[near])
        self.same &= not near.any() or self.arena.whole == self.plan.whole
        yield from self._from_memory(ids[near], memory[near])
        return ids[~near]

    def _note(self, ids: Ids, versions: Ids, encoded: bool) -> None:
        at = places(self.plan.ids, ids)
        self.decoded[at] = encoded
        if (self.version[at] != versions).any():
            self.version[at] = versions
            self.moved_on = True
            self.same = False

    def _settle(self, ids: Ids, tier: int, versions: Ids) -> None:
        at = places(self.plan.ids, ids)
        self.tier[at] = tier
        self.version[at] = versions


def _checksums(state: ShardState, ids: Ids) -> NDArray[np.uint64]:
    """Return the checksums of a state's copies of `ids`, which are its members: uint64 of the shape of `ids`."""
    return np.asarray(state.checksum[state.find(ids)], dtype=np.uint64)


def _perturbation(squared: NDArray[np.float64], distance: NDArray[np.float64] | None) -> Perturbation:
    unknown = np.isnan(squared)
    if unknown.any():
        if distance is None or not np.isfinite(distance[unknown]).all():
            return Perturbation(None, "unknown")
        squared = squared.copy()
        squared[unknown] = distance[unknown] ** 2
    norm = math.sqrt(float(squared.sum()))
    if not math.isfinite(norm):
        return Perturbation(None, "unknown")
    return Perturbation(norm, "estimated" if unknown.any() else "measured")


class SlotSink:
    """Writes into the slot of an arena that is not current. So the current state stays until the end.

    It writes the same rows into `slots`: uint8 of shape (rows, bytes per row), by group and tensor. Slots have no
    values yet, so copies are read into them before they are verified.
    """

    def __init__(self, arena: Arena, slots: Mapping[tuple[int, int], Bytes] | None = None) -> None:
        self.arena: Arena | None = arena
        self._arena = arena
        self._slots = {} if slots is None else slots
        begun = arena.begin_moment(flush=True)
        assert begun is not None
        self.slot, self.moment = begun
        self.written: Ids = np.zeros(arena.layout.partitions, np.int64)
        """Moment of each partition after `put`; 0 before `put`."""

    def room(self, group: int, ids: Ids) -> Sequence[Bytes | None] | None:
        """Return rows of slots, and of the arena's slot."""
        rows, tensors = rows_of(self._arena.layout, group, ids), self._arena.layout.groups[group].tensors
        inside = not self._arena.is_filling
        if inside:
            self.slot.begin(ids)
        places: list[Bytes | None] = []
        for t in range(len(tensors)):
            slot = self._slots.get((group, t))
            if slot is not None:
                self.written[ids] = 0
                places.append(slot[rows].reshape(-1))
            else:
                places.append(self.slot.rows(group, t)[rows].reshape(-1) if inside else None)
        return places if any(place is not None for place in places) else None

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]) -> None:
        """Write partitions and their versions. The store has these copies."""
        arena = self._arena
        rows = rows_of(arena.layout, group, ids)
        self.slot.begin(ids)
        for t, data in enumerate(tensors):
            slot = self._slots.get((group, t))
            # The rows that were read into `room` are in place.
            if slot is not None and not np.may_share_memory(slot, data):
                slot[rows] = data
            arena.put_rows(self.slot, group, t, rows, data)
        self.slot.end(ids, versions, self.moment)
        self.written[ids] = self.moment

    def settle(self, plan: Plan, whole: str) -> None:
        """Make the slot current, with what `plan`, which was executed, has restored.

        What was not written is carried over from the current slot, and its extras as well. whole: name of the state;
        "" if its copies are of several. Raises Unavailable.
        """
        arena, before = self._arena, self._arena.slot
        kept = arena.kept == before.moment
        if self.written.any() or not before.moment:
            if whole in ("", before.whole):  # another whole state has other extras, which the store has
                carry_extras(arena, self.moment)
            rest = self.written == 0
            arena.carry(np.flatnonzero(rest))
            self.slot.version[rest] = before.newest()[rest]
            self.slot.version[plan.ids] = plan.version
            head = max(int(self.slot.version.max(initial=before.head)), pack(1, 0))
            if whole and plan.step is not None:
                head = pack(epoch_of(head), plan.step)
            arena.flip(self.slot, self.moment, head, whole)
            there = np.flatnonzero(self.written)
            arena.acknowledge(there, self.slot.version[there], self.slot.moments[there])
            arena.note_distances(0.0, there)
            if kept or (there.size == plan.layout.partitions):
                arena.keep(self.moment)
        elif whole and before.whole != whole:
            before.name(whole)
