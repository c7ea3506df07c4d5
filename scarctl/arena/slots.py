"""Use the two slots of an arena: one is current, the other one takes copies of the next moment.

While readers hold a slot, to copy it to another place, training writes no newer state into it.

At most one slot is held, by all readers together. Who finds no hold takes one of the current slot; who finds one joins
it, for its slot and its deadline. The copier leaves a checkpoint out if it would write into the held slot. At the
deadline it ends the hold, whoever has it, and then writes the first byte. A flush ends any hold at any time: its state
is the one to be read. So a reader looks at its hold after the last byte, and before it relies on what it has read.

`current` is read and the hold is taken under one lock, that of the arena's file (`flock`). All readers of an arena are
threads of one process, its saver; the copier may be in another one.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.fields import HOLD, HOLD_SLOT, HOLD_UNTIL, Fields
from scarctl.arena.rows import copy_rows
from scarctl.arena.slot import Slot
from scarctl.errors import Contention
from scarctl.util.arrays import Bytes, Ids

log = logging.getLogger("scarctl")

LEAST_HOLD, MOST_HOLD = 5.0, 600.0
"""Shortest and longest time in seconds for which a reader holds a slot."""
_PATIENCE, _FLUSH_PATIENCE, _TRAINING_PATIENCE = 1.0, 10.0, 0.1
"""Seconds to wait for the lock: of a reader, a flush and a checkpoint. It is held for microseconds, unless a process
was stopped meanwhile."""
_PAUSE = 0.001
_STOPPED = "a process that does not run has locked this host's memory"
_HINT = "continue or end it; training goes on"


class Reading(Protocol):
    """A reader's hold of a slot, or its look at one."""

    slot: Slot

    def lasts(self) -> bool:
        """Return whether the slot is as it was at first."""

    def end(self) -> bool:
        """Read no more, and return whether the slot was as at first until now. May be called again."""


class Hold:
    """A reader's part in the hold of one slot."""

    def __init__(self, holds: Holds, number: int, slot: Slot, until: int) -> None:
        self.slot = slot
        self.number = number
        self._holds = holds
        self._until = until
        self._there = True

    @property
    def seconds(self) -> float:
        """Seconds until the hold may end."""
        return (self._until - time.monotonic_ns()) / 1e9

    def lasts(self) -> bool:
        """Return whether the slot is as it was when it was held."""
        return self._there and self._holds.number == self.number

    def end(self) -> bool:
        """Let go, and return whether the slot was as it was until now. May be called again."""
        lasted = self.lasts()
        if self._there:
            self._there = False
            self._holds.let_go(self.number)
        return lasted


class Look:
    """A reader's look at the current slot, which keeps nobody from writing: it is for what is copied in no time."""

    def __init__(self, slots: Slots) -> None:
        self.slot = slots.slot
        self._slots = slots
        self._moment = self.slot.moment

    def lasts(self) -> bool:
        """Return whether nothing was written into the slot meanwhile."""
        slots, current = self._slots, self._slots.slot
        if current is self.slot:
            return current.moment == self._moment
        # A checkpoint that began after the newest one writes into the slot.
        return current.moment == slots.newest_moment and self.slot.moment == self._moment

    def end(self) -> bool:
        """See `lasts`."""
        return self.lasts()


class Holds:
    """The hold of one arena, and its lock."""

    def __init__(self, words: Ids, file: int) -> None:
        """file: descriptor of the arena's file, -1 without one."""
        self._words = words
        self._file = file
        self._lock = threading.Lock()
        self._members: dict[int, int] = {}
        """Readers in this process by number of the hold."""
        self.shut_since: float | None = None
        """Since when (`time.monotonic`) another process has been inside `guard`; None if it was not, last of all."""
        self._told = False
        """This was logged."""

    @property
    def number(self) -> int:
        """Number of the present hold; 0 if no slot is held."""
        return int(self._words[HOLD])

    @contextmanager
    def guard(self, patience: float = _PATIENCE) -> Iterator[None]:
        """Keep the copier and readers apart. Raises Contention if another process is inside for `patience` seconds."""
        if not self._lock.acquire(timeout=patience):  # a thread waits for that process
            raise Contention(_STOPPED, hint=_HINT)
        try:
            if (file := self._file) < 0:
                yield
                return
            self._enter(file, patience)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _enter(self, file: int, patience: float) -> None:
        began = time.monotonic()
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.shut_since = None
                return
            now = time.monotonic()
            if self.shut_since is None and patience:
                self.shut_since = began
            if self.shut_since is not None and now > self.shut_since + _PATIENCE and not self._told:
                self._told = True
                log.warning("%s: no checkpoint is made until it is continued, or ends", _STOPPED)
            if now >= began + patience:
                raise Contention(_STOPPED, hint=_HINT)
            time.sleep(_PAUSE)

    def take(self, slots: tuple[Slot, Slot], current: int, seconds: float) -> Hold:
        """Take the hold of slot `current`, or join the hold that there is. Call it inside `guard`."""
        words, now = self._words, time.monotonic_ns()
        number = self.number
        if number not in self._members or now > words[HOLD_UNTIL]:
            words[HOLD] = 0
            words[HOLD_SLOT], words[HOLD_UNTIL] = current, now + int(seconds * 1e9)
            # Numbers never repeat: they are times, and a clock may be coarse.
            number = max([now, *(used + 1 for used in self._members)])
            words[HOLD] = number
        self._members[number] = self._members.get(number, 0) + 1
        return Hold(self, number, slots[int(words[HOLD_SLOT])], int(words[HOLD_UNTIL]))

    def let_go(self, number: int) -> None:
        """End one reader's part."""
        with self._lock:  # the copier can only end it, too
            left = self._members.pop(number, 1) - 1
            if left:
                self._members[number] = left
            elif self.number == number:
                self._words[HOLD] = 0

    def free(self, slot: int, *, flush: bool) -> bool:
        """Return whether the copier may write into a slot; end its hold if that is over. Call it inside `guard`.

        flush: end any hold.
        """
        words = self._words
        if flush:
            words[HOLD] = 0
        elif self.number and words[HOLD_SLOT] == slot:
            if time.monotonic_ns() <= words[HOLD_UNTIL]:
                return False
            words[HOLD] = 0
        return True

    def clear(self) -> None:
        """End any hold: those who had it are gone."""
        with self.guard():
            self._words[HOLD] = 0

    def close(self) -> None:
        """Use the file no longer."""
        self._file = -1


class Slots(Fields):
    """The slots, the hold and the requests of one arena."""

    slots: tuple[Slot, Slot]
    wish: Ids
    _holds: Holds

    @property
    def slot(self) -> Slot:
        """The current slot: the newest complete state."""
        return self.slots[self.current]

    @property
    def spare(self) -> Slot:
        """The other slot: an earlier state, in which copies of the next moment are made."""
        return self.slots[1 - self.current]

    @property
    def moments(self) -> Ids:
        """The moment of each copy in the current slot: see `Slot`."""
        return self.slot.moments

    @property
    def version(self) -> Ids:
        """The version of each copy in the current slot: see `Slot`."""
        return self.slot.version

    @property
    def whole(self) -> str:
        """See `Slot.whole`: the name of the state in the current slot."""
        return self.slot.whole

    def rows(self, g: int, t: int) -> Bytes:
        """See `Slot.rows`, of the current slot."""
        return self.slot.rows(g, t)

    def newest(self) -> Ids:
        """See `Slot.newest`, of the current slot."""
        return self.slot.newest()

    def intact(self) -> NDArray[np.bool_]:
        """See `Slot.intact`, of the current slot."""
        return self.slot.intact()

    @property
    def writable(self) -> bool:
        """Whether a moment can begin now: no reader holds the slot that is not current."""
        try:
            with self._holds.guard(0.0):
                return self._holds.free(self.spare.number, flush=False)
        except Contention:
            return False

    def begin_moment(self, *, flush: bool = False) -> tuple[Slot, int] | None:
        """Begin a moment: return the slot to write, and the moment's number. Return None if that slot is held.

        flush: end any hold. Raises Contention if a process that does not run prevents that.
        """
        patience = 0.0 if self._holds.shut_since is not None else _TRAINING_PATIENCE
        try:
            with self._holds.guard(_FLUSH_PATIENCE if flush else patience):
                spare = self.spare
                if not self._holds.free(spare.number, flush=flush):
                    return None
                moment = self._next_moment()  # first: a look is over from here on
                spare.name("")  # it has copies of several states
                return spare, moment
        except Contention:
            if flush:
                raise
            return None

    def carry(self, ids: Ids) -> None:
        """Bring these partitions of the other slot to what the current one has: copies of the same moments, or none."""
        here, there = self.slot, self.spare
        ids = ids[there.moments[ids] != here.moments[ids]]
        if ids.size:
            there.begin(ids)
            ids = ids[here.moments[ids] > 0]
            copy_rows(here, there, ids)
            there.end(ids, here.version[ids], here.moments[ids])

    def flip(self, slot: Slot, moment: int, head: int, whole: str) -> None:
        """Make `slot` current: it has all of the state of `moment`, of version `head`. Its extras are there already.

        whole: name of that state; "" if its copies are of several states.
        """
        slot.stamp(moment, head, whole)
        self._flip(slot.number)

    def settle(self) -> None:
        """After a process that died: forget the copies of a moment that was never complete."""
        spare, newest = self.spare, self.slot.moment
        if spare is not self.slot:
            late = np.flatnonzero(spare.moments > newest)
            if late.size:
                spare.moments[late] = 0

    def look(self) -> Look:
        """Look at the current slot without holding it."""
        return Look(self)

    @contextmanager
    def held(self, seconds: float) -> Iterator[Hold]:
        """Hold the current slot, or the one that is held, at most `seconds`. See above."""
        with self._holds.guard():
            hold = self._holds.take(self.slots, self.current, seconds)
        try:
            yield hold
        finally:
            hold.end()

    def end_holds(self) -> None:
        """End any hold: those who had it are gone."""
        self._holds.clear()

    def ask(self, *, whole: bool = False, ids: Ids | None = None, encoded: Ids | None = None) -> int:
        """Ask the saver for copies in the store, and return the request's number. It stays until they are durable.

        whole: everything that is pending, with the extras. ids, encoded: partitions that are saved, exactly or encoded,
        if they are pending then.
        """
        number = self.asked + 1
        for some, code in ((ids, 0), (encoded, 1)):
            if some is not None:
                self.wish[some] = 2 * number + code
        return self._ask(whole)
