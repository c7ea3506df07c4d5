"""Find the saved copies of one session's state, and bring them into its arena, verified.

Copies are in three places: in both slots of the arena, and in the store. What is read from the store goes into the slot
that is not current. This module does not change live values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.kinship import require_same_line
from scarctl.arena.notes import memory_notes, stored_notes
from scarctl.checkpoint.filling import Staged
from scarctl.checkpoint.found_extras import Saved, all_extras, newest_extras, sealed_extras
from scarctl.checkpoint.loading import NewSlots
from scarctl.recovery.execute import SlotSink, execute
from scarctl.recovery.plan import MEMORY, STORE, Plan, plan_partial, plan_rollback, versions_of
from scarctl.recovery.report import Report
from scarctl.state.caveats import Caveats
from scarctl.state.extras import Extras, Notes
from scarctl.state.held import Held
from scarctl.store import ShardState, Snapshot, Store
from scarctl.store.saved import seconds_since
from scarctl.util.arrays import Ids, places, union

Sealed = tuple[int, int, str]
"""A sealed state; see `Plan.sealed`."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where the copies of some partitions are, verified."""

    report: Report
    spare: Ids
    """The partitions, ascending, whose copies are in the slot that is not current; all others are in the other."""
    sink: SlotSink
    """What has written to that slot."""

    def settle(self) -> None:
        """Make that slot current, with the whole state that was fetched."""
        plan = self.report.plan
        self.sink.settle(plan, plan.whole if self.report.label.of_one else "")


class Copies:
    """The copies of one session's state."""

    def __init__(self, arena: Arena, store: Store, shard_of: NDArray[np.int32], caveats: Caveats) -> None:
        """Take what holds the copies. caveats: gets a caveat if bytes in memory have changed."""
        self._arena = arena
        self._layout = arena.layout
        self._store = store
        self._shard_of = shard_of
        self._caveats = caveats

    def all_extras(self) -> Iterator[Saved]:
        """Yield all extras that can be read, newest first. Raises Unavailable, AccessDenied."""
        return all_extras(self._arena, self._store)

    def notes_of(self, whole: str) -> Notes:
        """Return the notes that were saved with the commit `whole` of the whole state.

        Raises Corruption if they are damaged or gone, Unavailable, AccessDenied.
        """
        found = memory_notes(self._arena, whole)
        if found is not None:
            return found
        return stored_notes(self._store, [self._store.state(self._store.lane)], whole)

    def newest(self) -> tuple[ShardState, Saved | None] | None:
        """Return the store's state and the newest extras, which are None if no extras were ever saved.

        Returns None if a partition has no copy: the run died before its first checkpoint was complete. Raises
        NoIntactCopy if extras were saved, but cannot be read.
        """
        state, there = self._store.state(self._store.lane), self._arena.intact()
        there[state.ids[state.saved]] = True
        return (state, newest_extras(self._arena, self._store, state)) if there.all() else None

    def in_memory(self) -> Held | None:
        """Return what this host's memory has, before a recovery changes it; None without any copy."""
        arena = self._arena
        if not arena.intact().any():
            return None
        notes = memory_notes(self._arena)
        since = None if notes is None or notes.at is None else max(0.0, time.time() - notes.at)
        return Held.of_versions(arena.newest(), since)

    def in_store(self, plan: Plan, saved_at: str | None) -> Held:
        """Return what the store has, as far as `plan` knows it. saved_at: time of its newest commit."""
        stored = versions_of(plan.state, np.arange(self._layout.partitions))
        return Held.of_versions(stored, seconds_since(saved_at))

    def require_same_line(self) -> None:
        """Raise Fenced unless arena and store are of the same line."""
        require_same_line(self._arena, self._store)

    def fetch_all(
        self, state: ShardState, new: NewSlots | None = None, staged: Staged | None = None
    ) -> Report:
        """Bring the newest copy of every partition into the arena. Raises NoIntactCopy.

        new: slots that get the same values, as far as they come from the store.
        staged: gets all copies instead, and is `complete`, if every copy is the planned one of the store.
        """
        everything = np.arange(self._layout.partitions)
        plan = plan_partial(everything, self._layout, self._shard_of, state, self._arena)
        if staged is not None and (plan.tier == STORE).all() and not plan.encoded:
            report = execute(plan, self._store, self._arena, staged)
            staged.complete = report.plan is plan
            if staged.complete:
                return report
        report, sink = self._fetch(plan, new)
        Fetched(report, np.flatnonzero(sink.written), sink).settle()
        return report

    def fetch_lost(self, ids: Ids, survivors: str) -> Fetched:
        """Find the newest copies of partitions `ids`. Raises NoIntactCopy.

        survivors: name of the commit of the whole state to which all other live values belong; "" without one.
        """
        arena = self._arena
        torn = ids[~arena.intact()[ids]]
        # The arena has the newest copies of all partitions: the store is read only for torn ones.
        state = self._stored(torn)
        plan = plan_partial(ids, self._layout, self._shard_of, state, arena, survivors=survivors)
        report, sink = self._fetch(plan)
        return Fetched(report, np.flatnonzero(sink.written), sink)

    def fetch_before(self, ids: Ids, before: int) -> Fetched:
        """Find the newest copies of partitions `ids` that are of step `before` or earlier.

        Call it while nothing is saved. Raises NoIntactCopy.
        """
        from scarctl.recovery.before import in_memory_before, plan_before

        arena = self._arena
        far = ids[~in_memory_before(arena, ids, before)[0]]
        state = self._stored(far)
        plan = plan_before(ids, self._layout, self._shard_of, self._store, state, arena, before)
        report, sink = self._fetch(plan)
        older = plan.spare[report.plan.tier[places(report.plan.ids, plan.spare)] == MEMORY]
        return Fetched(report, union(older, np.flatnonzero(sink.written)), sink)

    def _stored(self, wanted: Ids) -> ShardState:
        """Return the store's state if any partition is wanted from it, otherwise an empty one."""
        if not wanted.size:
            return ShardState(self._store.lane)
        state = self._store.state(self._store.lane)
        self.require_same_line()
        return state

    def fetch_sealed(
        self, *, lost: int | None, until: Sealed | None, snapshot: Snapshot | None
    ) -> tuple[Fetched, Extras]:
        """Find the newest sealed state, and return its extras too. Raises NoIntactCopy.

        lost: number of lost partitions, for the report; None: all.
        until: the newest sealed state that may be taken.
        snapshot: take this snapshot instead.
        """
        plan = plan_rollback(
            self._store, self._layout, self._shard_of, self._arena, lost=lost, until=until, snapshot=snapshot
        )
        report, sink = self._fetch(plan)
        extras = sealed_extras(self._store, report.plan)
        return Fetched(report, np.flatnonzero(sink.written), sink), extras

    def _fetch(self, plan: Plan, new: NewSlots | None = None) -> tuple[Report, SlotSink]:
        if self._arena.is_filling:
            self._arena.reserve_rows()
        sink = SlotSink(self._arena, None if new is None else new.rows)
        report = execute(plan, self._store, self._arena, sink)
        self._arena.end_filling()
        if report.memory_fault:
            # The state has the right bytes: the store's.
            self._caveats.say("memory-changed", report.memory_fault)
        if new is not None:
            new.written = sink.written
        return report, sink
