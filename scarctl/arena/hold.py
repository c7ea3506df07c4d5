"""Hold a slot: while readers copy it to another place, training writes no newer state into it.

At most one slot is held, by all readers together. Who finds no hold takes one of the current slot; who finds one joins
it, for its slot and its deadline. The copier leaves a checkpoint out if it would write into the held slot. At the
deadline it ends the hold, whoever has it, and then writes the first byte; a flush ends it at any time. So a reader
looks at its hold after the last byte, and before it relies on what it has read.

`current` is read and the hold is taken under one lock, that of the arena's file (`flock`). All readers of an arena are
threads of one process, its saver; the copier may be in another one.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scarctl.arena.fields import HOLD, HOLD_SLOT, HOLD_UNTIL
from scarctl.errors import Contention
from scarctl.util.arrays import Ids

if TYPE_CHECKING:
    from scarctl.arena.slot import Slot

_PATIENCE = 1.0
"""Seconds to wait for the lock. It is held for microseconds, unless a process was stopped meanwhile."""
_PAUSE = 0.001


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


class Holds:
    """The hold of one arena, and its lock."""

    def __init__(self, words: Ids, file: int) -> None:
        """file: descriptor of the arena's file, -1 without one."""
        self._words = words
        self._file = file
        self._lock = threading.Lock()
        self._members: dict[int, int] = {}
        """Readers in this process by number of the hold."""

    @property
    def number(self) -> int:
        """Number of the present hold; 0 if no slot is held."""
        return int(self._words[HOLD])

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Keep the copier and readers apart. Raises Contention if a stopped process is inside."""
        with self._lock:
            if self._file < 0:
                yield
                return
            until = time.monotonic() + _PATIENCE
            while True:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise Contention(
                            "another process, which does not run, is reading this host's memory",
                            hint="continue or end it; training goes on",
                        ) from None
                    time.sleep(_PAUSE)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

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
        with self.guard():
            left = self._members.pop(number, 1) - 1
            if left:
                self._members[number] = left
            elif self.number == number:
                self._words[HOLD] = 0

    def free(self, slot: int, *, flush: bool) -> bool:
        """Return whether the copier may write into a slot; end its hold if that is over. Call it inside `guard`."""
        words = self._words
        if self.number and words[HOLD_SLOT] == slot:
            if not flush and time.monotonic_ns() <= words[HOLD_UNTIL]:
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
