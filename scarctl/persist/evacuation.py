"""Save pending copies before a deadline: in small commits, the most changed per byte first, until time runs out.

Commits remain valid whenever the process is killed. If all copies were saved in time, a sealed one follows: then the
store has the whole state of the newest step. The plan is `scarctl.policy.evacuation`. Hosts that keep copies of
this memory get copies before the store does (`scarctl.peers.evacuation`). The store then begins with copies that these
hosts lack.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.header import EXTRAS
from scarctl.arena.notes import UNKNOWN
from scarctl.arena.slot import Slot
from scarctl.arena.slots import Hold, Reading
from scarctl.errors import ScarError, UsageError
from scarctl.persist.evacuated import NOWHERE, Evacuated, why_mixed_ranks
from scarctl.policy.evacuation import Pace, fitting, order
from scarctl.state.caveats import Caveat
from scarctl.state.common import UNREAD
from scarctl.state.extras import Notes
from scarctl.state.label import Label
from scarctl.state.layouts import parameters_of
from scarctl.state.version import NEVER, step_of
from scarctl.theory.history import History
from scarctl.theory.rework import grouped
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")

RESERVE = 0.05
"""Fraction of the time reserved for the report and the end of the process."""
_MOST_RESERVE = 1.0
_PAUSE = 0.05
"""Seconds to pause after a failure, doubled after each further one."""


def before(deadline: float, seconds: float) -> float:
    """Return the time at which saving ends, for a deadline `seconds` away: some time is reserved for the rest."""
    return deadline - min(_MOST_RESERVE, RESERVE * seconds)


class Tier(Protocol):
    """A place that outlives the host."""

    extras_moment: int
    """The newest moment whose extras the tier is known to have; 0 for none."""

    def commit(self, hold: Reading, ids: Ids, *, seal: bool, extras: bool = True) -> int | None:
        """Save copies of the slot that is held. Return their bytes, now durable; None if the hold has ended.

        seal: the tier then has everything of that slot. extras: with its extras.
        """

    def stored(self) -> Ids:
        """Return the version that the tier has of every partition, -1 for none: int64 (partitions,)."""

    def notes(self, whole: str) -> Notes:
        """Return the notes that were saved with the commit `whole` of the whole state. Raises Corruption without it."""


STORE_ONLY = "store"
"""Name of the only place that counts if the other hosts shut down, too."""


def unknown_host(name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a host that an evacuation cannot use. known: names of usable hosts, or all that it names."""
    names = ", ".join(sorted(set(known)))
    return UsageError(
        f"to={name!r:.200}: not the name or address of one host that takes copies of this run's memory",
        hint=f"one of: {names}"
        if names
        else "with Settings(peers=1), hosts keep copies of each other's memory",
        kind="unknown-host",
    )


class Copies(Protocol):
    """The copies of one arena in the memory of other hosts."""

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until another host has all of this memory, or none can get more."""

    def moments(self) -> Ids:
        """Return the moment of every copy that another host has: int64 (partitions,), 0 for none."""

    def complete(self) -> bool:
        """Return whether another host has all of this memory, the extras included."""

    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts that have any of these copies."""

    def whole(self) -> str:
        """Return the name of the whole state in this memory if one of these hosts has it; otherwise ""."""


class Evacuation:
    """One evacuation of one arena. `run` saves, in the persister's thread; `report` may be called in any thread."""

    def __init__(
        self,
        arena: Arena,
        tier: Tier,
        deadline: float,
        *,
        earlier: Pace | None = None,
        copies: Copies | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare. deadline: seconds on `clock`. earlier: pace of saving so far. copies: the arena's on other hosts."""
        self.error: str | None = None
        self.saved = False
        """Whether `run` saves nothing more: at most it reads the notes."""
        self._arena = arena
        self._tier = tier
        self._copies = copies
        self._deadline = deadline
        self._clock = clock
        self._sleep = sleep
        self._pace = Pace(earlier)
        self.written_bytes = 0
        self._commits = self._failures = 0
        self._notes = Notes.from_tree(None)
        self._seals: dict[str, Notes] = {}
        """The notes that were saved with commits of the whole state, by name."""
        self.unlabelled = "the time was up"
        """Why the notes of the newest one are not known."""
        self._unread = False
        """Whether the extras in memory could not be read."""
        try:
            found = read_extras(arena)
        except ScarError as error:
            self.error, self._unread = error.message, True
            return
        if found is not None and found.tree is not None:
            self._notes = Notes.from_tree(found.tree)
            if found.whole:
                self._seals[found.whole] = self._notes

    def run(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Save until all is durable and sealed, the deadline would be missed, or `ended` returns True.

        Temporary faults are retried. Others end the evacuation, and are in `error`. What was saved with the newest seal
        is read last, if there is time.
        """
        self._save(ended)
        self.saved = True
        whole = self._arena.whole
        if whole and whole not in self._seals and self._left() > 0 and not ended():
            try:
                self._seals[whole] = self._tier.notes(whole)
            except ScarError as error:
                self.unlabelled = error.message

    def _save(self, ended: Callable[[], bool]) -> None:
        while not ended():
            try:
                with self._arena.held(max(0.0, self._left()) + _PAUSE) as hold:
                    if hold.slot is self._arena.slot:
                        more = self._commit(hold)
                    else:  # another reader has held an earlier state
                        self._arena.end_holds()
                        more = self._left() > 0
            except ScarError as error:
                self.error = error.message
                log.warning("evacuating: %s", error)
                more = error.retryable and self._pause()
            except (OSError, MemoryError) as error:
                self.error = str(error)
                log.warning("evacuating: %s", error)
                more = self._pause()
            if not more:
                return

    def _pause(self) -> bool:
        """Wait a little after a failure. Return whether there is time for another attempt."""
        pause = _PAUSE * 2 ** min(self._failures, 6)
        self._failures += 1
        if pause > self._left():
            return False
        self._sleep(pause)
        return True

    def _left(self) -> float:
        return self._deadline - self._clock()

    def _commit(self, hold: Hold) -> bool:
        """Save the next copies, or the seal. Return False if nothing is left, or no more can be saved in time."""
        arena, slot = self._arena, hold.slot
        pending = np.flatnonzero(slot.differs(arena.saved))
        extra_bytes = 0 if self._has_extras(slot) else self._extras_bytes(slot.number)
        if not pending.size:
            return self._seal(hold, extra_bytes)
        room, most = self._pace.room(self._left())
        if not room:
            return False
        missing = self._tier.stored()[pending] == NEVER
        unsaved = arena.distance[pending].astype(np.float32)
        left = pending[order(unsaved, arena.layout.partition_bytes[pending], missing)]
        if self._copies is not None:  # copies that no other host has come first
            left = left[np.argsort(self._elsewhere()[left], kind="stable")]
        # The extras come with the first copies, unless they take more than half of the room.
        extras = 0 < extra_bytes <= room // 2
        nbytes = extra_bytes if extras else 0
        sizes = arena.layout.partition_bytes[left]
        taken = np.sort(left[fitting(sizes, room - nbytes, most - nbytes)])
        return bool(taken.size) and self._save_these(hold, taken, nbytes, seal=False, extras=extras)

    def _seal(self, hold: Hold, extra_bytes: int) -> bool:
        """Save what the store has in fewer bits exactly, and seal the state. Return False if there is nothing to do."""
        arena, slot = self._arena, hold.slot
        lossy = np.flatnonzero((arena.encoding_error >= 0) & slot.intact())
        if not slot.moment or (not lossy.size and arena.kept == slot.moment):
            return False
        lacking = np.sqrt(np.minimum(arena.encoding_error[lossy], 1e70)).astype(np.float32)
        ids = lossy[order(lacking, arena.layout.partition_bytes[lossy], np.zeros(lossy.size, dtype=bool))]
        sizes = arena.layout.partition_bytes[ids]
        if self._pace.seconds(extra_bytes + int(sizes.sum())) <= self._left():
            return self._save_these(hold, np.sort(ids), extra_bytes, seal=True, extras=True)
        room, most = self._pace.room(self._left())
        ids = ids[~self._elsewhere()[ids]]
        taken = np.sort(ids[fitting(arena.layout.partition_bytes[ids], room, most)])
        return bool(taken.size) and self._save_these(hold, taken, 0, seal=False, extras=False)

    def _save_these(self, hold: Hold, ids: Ids, extra_bytes: int, *, seal: bool, extras: bool) -> bool:
        """Make one commit. Return whether more may be left."""
        started = self._clock()
        written = self._tier.commit(hold, ids, seal=seal, extras=extras)
        if written is None:
            return True  # a newer state has taken the slot: begin again with that
        if written + extra_bytes:
            self._pace.add(written + extra_bytes, self._clock() - started)
        self.written_bytes += written + extra_bytes
        self._commits += 1
        self._failures, self.error = 0, None
        return not seal

    def _has_extras(self, slot: Slot) -> bool:
        """Return whether the tier has the extras of a slot."""
        return slot.moment in (self._arena.kept, self._tier.extras_moment)

    def _extras_bytes(self, slot: int) -> int:
        try:
            return os.stat(self._arena.folder / EXTRAS[slot]).st_size
        except OSError:
            return 0

    def _elsewhere(self) -> NDArray[np.bool_]:
        """Return which copies of this memory another host has unchanged: bool of shape (partitions,)."""
        arena = self._arena
        if self._copies is None:
            return np.zeros(arena.layout.partitions, dtype=bool)
        there: NDArray[np.bool_] = arena.intact() & (self._copies.moments() == arena.moments)
        return there

    def report(self) -> Evacuated:
        """Report what is safe now, and what a loss of the host would lose."""
        arena = self._arena
        stored = self._tier.stored()
        waiting, lacking = arena.pending() | ~arena.intact(), arena.encoding_error
        unsaved = waiting | (lacking >= 0)  # an encoded copy is not the copy in memory
        unsaved &= arena.version >= 0  # without a copy here, the newest one is the store's, if there is any
        there = unsaved & self._elsewhere()
        ids = np.flatnonzero(unsaved & ~there)
        sizes = arena.layout.partition_bytes
        parameters = parameters_of(arena.layout)
        mine = ids[parameters[ids]]
        newest = step_of(int(max(arena.newest().max(initial=arena.sealed), stored.max(initial=NEVER))))
        peers = () if self._copies is None else self._copies.hosts()
        whole = "" if self._unread else arena.whole
        sealed = bool(whole) and arena.kept == arena.slot.moment
        named = bool(whole) and self._copies is not None and self._copies.whole() == whole
        notes = self._seals.get(whole)
        saved = notes or Notes(caveats=(Caveat(UNREAD, UNKNOWN.format(self.unlabelled)),))
        in_store = sealed and not unsaved.any() and step_of(arena.slot.head) == newest
        on_peer = named and bool(peers) and not ids.size and arena.head_step == newest
        if in_store or on_peer:
            declared = None if notes is None else notes.declared
            label = Label(newest, newest, caveats=why_mixed_ranks([saved]), declared=declared)
        else:
            label = Label.of(np.where(there, arena.version, stored), NOWHERE)
        ages, counts = grouped(np.maximum(newest - np.maximum(step_of(stored[mine]), 0), 0))
        known = np.where(waiting, arena.distance, np.sqrt(np.maximum(lacking, 0.0)))[mine]
        # The store may have a copy that is newer than the distance was measured from: then it is an upper bound.
        squared = float(np.square(known).sum()) if self._notes.norm == "l2" else math.nan
        squared = math.nan if (stored[mine] == NEVER).any() else squared
        return Evacuated(
            step=newest,
            total_partitions=arena.layout.partitions,
            total_bytes=arena.layout.nbytes,
            written_bytes=self.written_bytes,
            commits=self._commits,
            lost_partitions=int(ids.size),
            lost_bytes=int(sizes[ids].sum()),
            squared=(squared if math.isfinite(squared) else None) if mine.size else 0.0,
            sealed=in_store,
            commit_name=whole,
            label=label,
            caveats=saved.caveats,
            common=saved.common,
            ages=tuple(ages.tolist()),
            counts=tuple(counts.tolist()),
            parameters=int(parameters.sum()),
            points=tuple(map(tuple, History.from_array(self._notes.points).to_array().tolist())),
            peer_partitions=int(there.sum()),
            peer_bytes=int(sizes[there].sum()),
            peers=peers,
            peer_sealed=on_peer,
            extras_lost=self._lacks_extras(),
            error=self.error,
        )

    def _lacks_extras(self) -> bool:
        """Return whether neither the store nor another host has the newest extras."""
        if self._copies is not None and self._copies.complete():
            return False
        slot = self._arena.slot
        if self._unread or not slot.moment:
            return self._unread
        return not self._has_extras(slot)


def not_evacuated(arena: Arena, error: ScarError, copies: Copies | None = None) -> Evacuated:
    """Report on an arena whose saver cannot be reached, or does not save. copies: the arena's on other hosts."""
    made = Evacuation(arena, _Unreached(arena), 0.0, copies=copies)
    made.unlabelled = error.message
    return replace(made.report(), error=error.message)


class _Unreached:
    """The store, as far as the arena knows it."""

    extras_moment = 0

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def stored(self) -> Ids:
        return np.maximum(self._arena.durable, NEVER)

    def notes(self, whole: str) -> Notes:
        raise AssertionError("this tier only reports")

    def commit(self, hold: Reading, ids: Ids, *, seal: bool, extras: bool = True) -> int | None:
        raise AssertionError("this tier only reports")
