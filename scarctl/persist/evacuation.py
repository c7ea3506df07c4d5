"""Save pending copies before a deadline: in small commits, the most changed per byte first, until time runs out.

Commits remain valid whenever the process is killed. If all copies were saved in time, the waiting seals follow: then
the store has the whole state of the newest step. The plan is `scarctl.policy.evacuation`. Hosts that keep copies of
this memory get copies before the store does (`scarctl.peers.evacuation`). The store then begins with copies that these
hosts lack.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.notes import UNKNOWN
from scarctl.arena.queue import NEWEST, HandOver, HandOverQueue, unsaved_distances
from scarctl.errors import ScarError, UsageError
from scarctl.persist.evacuated import NOWHERE, Evacuated, why_mixed_ranks
from scarctl.persist.speed import Speed
from scarctl.policy.evacuation import Pace, fitting, order
from scarctl.state import codec
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

    def commit_part(self, handover: HandOver, ids: Ids, extras: Any) -> int:
        """Save copies as they are in memory, with the extras unless they are None. Return their bytes, now durable."""

    def commit_extras(self, handover: HandOver) -> bool:
        """Save a hand-over's extras, unless it has them. Return False if it has a later step, so that it cannot."""

    def persist(self, handover: HandOver) -> int:
        """Save the rest of a hand-over, and its seal if it has one. Return the bytes saved, without extras."""

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

    def versions(self) -> Ids:
        """Return the version of every copy that another host has unchanged: int64 (partitions,), -1 for none."""

    def complete(self) -> bool:
        """Return whether another host has all of this memory, hand-overs with their extras included."""

    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts that have any of these copies."""

    def whole(self) -> str:
        """Return the name of the whole state in this memory if one of these hosts has it; otherwise ""."""


@dataclass(slots=True)
class _Order:
    """Pending copies of one version, in the order in which they are saved."""

    version: int
    ids: Ids


class Evacuation:
    """One evacuation of one arena. `run` saves, in the persister's thread; `report` may be called in any thread."""

    def __init__(
        self,
        arena: Arena,
        queue: HandOverQueue,
        tier: Tier,
        deadline: float,
        *,
        speed: Speed | None = None,
        copies: Copies | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare. deadline: seconds on `clock`. speed: speed of saving so far. copies: the arena's on other hosts."""
        self.error: str | None = None
        self.saved = False
        """Whether `run` saves nothing more: at most it reads the notes."""
        self._arena = arena
        self._queue = queue
        self._tier = tier
        self._copies = copies
        self._deadline = deadline
        self._clock = clock
        self._sleep = sleep
        self._pace = _pace_of(speed)
        self.written_bytes = 0
        self._commits = self._failures = 0
        self._waiting: list[HandOver] = []
        self._unsaved = np.full(arena.layout.partitions, np.nan, dtype=np.float32)
        self._notes = Notes.from_tree(None)
        self._seals: dict[str, Notes] = {}
        """The notes that were saved with commits of the whole state, by name."""
        self.unlabelled = "the time was up"
        """Why the notes of the newest one are not known."""
        self._order: _Order | None = None
        self._extras: HandOver | None = None
        """The hand-over whose extras are not saved yet."""
        self._unread = False
        """Whether the queue could not be read, so that its extras are unknown."""
        self._look()

    def _look(self) -> None:
        """Read the queue: the distances of pending copies from the store's, and the newest extras."""
        try:
            self._waiting = self._queue.pending()
        except ScarError as error:
            self.error, self._unread = error.message, True
            return
        moment = self._queue.moment()
        if moment is not None and self._is_left(moment):
            self._waiting.append(moment)
        self._unsaved = unsaved_distances(self._waiting, self._arena.layout.partitions)
        self._extras = next((one for one in reversed(self._waiting) if one.extras is not None), None)
        if self._extras is not None:
            self._notes = Notes.from_tree(self._extras.extras)
        seals = [one for one in self._waiting if one.sealed and one.extras is not None]
        self._seals |= {one.whole: Notes.from_tree(one.extras) for one in seals}

    def _is_left(self, moment: HandOver) -> bool:
        """Return whether neither the store nor a hand-over that waits has the newest memory checkpoint as a whole."""
        lifted = self._arena.lifted
        newest = max((one.version for one in self._waiting), default=NEVER)
        known = np.array([self._arena.sealed, newest, moment.version])
        sealed, waits, own = lifted(known).tolist()
        return bool(sealed < own and waits <= own and all(one.whole != moment.whole for one in self._waiting))

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
                more = self._commit() or self._seal()
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

    def _commit(self) -> bool:
        """Save the next copies. Return False if none is left, or no more can be saved in time."""
        waiting = self._next()
        room, most = self._pace.room(self._left())
        if not room:
            return False
        if self._commit_older_extras(waiting.version, room):
            return True
        extras, extra_bytes = self._extras_within(waiting.version, room)
        sizes = self._arena.layout.partition_bytes[waiting.ids]
        taken = waiting.ids[fitting(sizes, room - extra_bytes, most - extra_bytes)]
        if not taken.size:
            return False
        number = self._extras.number if extras is not None and self._extras is not None else 0
        handover = HandOver(number, waiting.version, waiting.ids, whole="", extras=None)
        started = self._clock()
        written = self._tier.commit_part(handover, np.sort(taken), extras)
        self._committed(written + extra_bytes, started)
        if extras is not None:
            self._extras = None
        return True

    def _commit_older_extras(self, version: int, room: int) -> bool:
        """Save the newest extras alone if no copies of their step wait: the store takes none after newer copies."""
        extras = self._extras
        if extras is None or extras.version >= version or (nbytes := _bytes_of(extras.extras)) > room:
            return False
        if not self._tier.commit_extras(extras):
            return False
        self._extras = None
        self._committed(nbytes)  # so few bytes say nothing of the pace
        return True

    def _committed(self, nbytes: int, started: float | None = None) -> None:
        if started is not None:
            self._pace.add(nbytes, self._clock() - started)
        self.written_bytes += nbytes
        self._commits += 1
        self._failures, self.error = 0, None

    def _extras_within(self, version: int, room: int) -> tuple[Any, int]:
        """Return the newest extras and their bytes, if they are of this version and take at most half of the room."""
        if self._extras is None or self._extras.version != version:
            return None, 0
        nbytes = _bytes_of(self._extras.extras)
        return (self._extras.extras, nbytes) if nbytes <= room // 2 else (None, 0)

    def _next(self) -> _Order:
        """Return pending copies of the oldest version, as steps in the store never decrease; last, encoded ones."""
        arena = self._arena
        ids = np.flatnonzero(arena.pending() & arena.intact())
        if not ids.size:
            return self._encoded()
        versions = arena.version[ids]
        version = int(versions.min())
        if self._order is None or self._order.version != version:
            ids = ids[versions == version]
            missing = self._tier.stored()[ids] == NEVER
            self._order = _Order(
                version, ids[order(self._unsaved[ids], arena.layout.partition_bytes[ids], missing)]
            )
        left = self._order.ids
        left = left[(arena.version[left] == version) & (arena.durable[left] != version)]
        if not left.size:  # these were copied again at this version meanwhile, and have no place in the order
            left = ids[versions == version]
        if self._copies is not None:  # copies that no other host has come first
            left = left[np.argsort(self._elsewhere()[left], kind="stable")]
        self._order = _Order(version, left)
        return self._order

    def _encoded(self) -> _Order:
        """Return the copies that the store has in fewer bits, the least exact per byte first, to save them exactly."""
        arena = self._arena
        ids = np.flatnonzero((arena.encoding_error >= 0) & arena.intact() & ~self._elsewhere())
        lacking = np.sqrt(np.minimum(arena.encoding_error[ids], 1e70)).astype(np.float32)
        ids = ids[order(lacking, arena.layout.partition_bytes[ids], np.zeros(ids.size, dtype=bool))]
        return _Order(int(arena.newest().max(initial=NEVER)), ids)

    def _elsewhere(self) -> NDArray[np.bool_]:
        """Return which copies of this memory another host has unchanged: bool of shape (partitions,)."""
        arena = self._arena
        if self._copies is None:
            return np.zeros(arena.layout.partitions, dtype=bool)
        there: NDArray[np.bool_] = arena.intact() & (self._copies.versions() == arena.version)
        return there

    def _seal(self) -> bool:
        """Finish a waiting hand-over whose copies are all durable, including its seal. Return whether one was left."""
        arena = self._arena
        if (arena.pending() & arena.intact()).any() or not self._waiting:
            return False
        handover = self._waiting[0]
        newest = handover is self._extras
        nbytes = _bytes_of(handover.extras) if handover.sealed or newest else 0
        if handover.sealed:  # it saves encoded copies again, exactly
            nbytes += int(arena.layout.partition_bytes[arena.encoding_error >= 0].sum())
        if self._pace.seconds(nbytes) > self._left():
            return False
        started = self._clock()
        written = self._tier.persist(handover)
        if nbytes:
            self._committed(written + nbytes, started)
        if newest:
            if not self._tier.commit_extras(handover):
                return False
            self._extras = None
        if handover.number != NEWEST:  # memory has that moment for as long as it stays as it is
            self._queue.remove(handover.number)
        del self._waiting[0]
        return True

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
        # A waiting seal has not reached the store, even if an earlier one of the same step has.
        whole = "" if self._unread else arena.whole
        sealed = bool(whole) and all(one.whole != whole for one in tuple(self._waiting))  # `run` removes some
        named = bool(whole) and self._copies is not None and self._copies.whole() == whole
        notes = self._seals.get(whole)
        saved = notes or Notes(caveats=(Caveat(UNREAD, UNKNOWN.format(self.unlabelled)),))
        in_store = sealed and not unsaved.any() and step_of(arena.sealed) == newest
        on_peer = named and bool(peers) and not ids.size and arena.head_step == newest
        if in_store or on_peer:
            declared = None if notes is None else notes.declared
            label = Label(newest, newest, caveats=why_mixed_ranks([saved]), declared=declared)
        else:
            label = Label.of(np.where(there, arena.version, stored), NOWHERE)
        ages, counts = grouped(np.maximum(newest - np.maximum(step_of(stored[mine]), 0), 0))
        known = np.where(waiting, self._unsaved, np.sqrt(np.maximum(lacking, 0.0)))[mine]
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
        return self._extras is not None or self._unread


def not_evacuated(
    arena: Arena, queue: HandOverQueue, error: ScarError, copies: Copies | None = None
) -> Evacuated:
    """Report on an arena whose saver cannot be reached, or does not save. copies: the arena's on other hosts."""
    made = Evacuation(arena, queue, _Unreached(arena), 0.0, copies=copies)
    made.unlabelled = error.message
    return replace(made.report(), error=error.message)


class _Unreached:
    """The store, as far as the arena knows it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def stored(self) -> Ids:
        return np.maximum(self._arena.durable, NEVER)

    def notes(self, whole: str) -> Notes:
        raise AssertionError("this tier only reports")

    def commit_part(self, handover: HandOver, ids: Ids, extras: Any) -> int:
        raise AssertionError("this tier only reports")

    def commit_extras(self, handover: HandOver) -> bool:
        raise AssertionError("this tier only reports")

    def persist(self, handover: HandOver) -> int:
        raise AssertionError("this tier only reports")


def _pace_of(speed: Speed | None) -> Pace:
    if speed is None or not speed.bytes_per_second:
        return Pace()
    seconds = speed.handover_seconds
    return Pace(speed.bytes_per_second * seconds, seconds, seconds * (speed.fixed_share or 0.0))


def _bytes_of(extras: Any) -> int:
    if extras is None:
        return 0
    text, tensors = codec.encode(extras)
    return len(text) + sum(memoryview(tensor.data).nbytes for tensor in tensors.values())
