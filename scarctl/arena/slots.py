"""Use the two slots of an arena: one is current, the other one takes copies of the next moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.fields import Fields
from scarctl.arena.hold import Hold, Holds
from scarctl.arena.rows import copy_rows
from scarctl.arena.slot import Slot
from scarctl.errors import Contention
from scarctl.util.arrays import Bytes, Ids


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

    def begin_moment(self, *, flush: bool = False) -> tuple[Slot, int] | None:
        """Begin a moment: return the slot to write, and the moment's number. Return None if that slot is held.

        flush: end the hold.
        """
        try:
            with self._holds.guard():
                if not self._holds.free(self.spare.number, flush=flush):
                    return None
                return self.spare, self._next_moment()
        except Contention:
            if flush:
                raise
            return None

    def adopt_moment(self, moment: int) -> None:
        """Count moments from `moment` on: the copies are those of another arena."""
        self._reach_moment(moment)

    def carry(self, ids: Ids) -> None:
        """Copy these partitions from the current slot into the other one, as copies of the same moments."""
        here, there = self.slot, self.spare
        if ids.size and here is not there:
            there.begin(ids)
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

    @contextmanager
    def held(self, seconds: float) -> Iterator[Hold]:
        """Hold the current slot, or the one that is held, at most `seconds`. See `scarctl.arena.hold`."""
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
