"""Send a host's memory to the hosts that keep copies before it shuts down: the most changed per byte first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.peers.link import CONNECTED, State
from scarctl.peers.sender import Sender
from scarctl.policy.evacuation import order
from scarctl.util.arrays import Ids

HEAD_START = 0.1
"""Largest fraction of the time for peers alone, before the store is written to."""
_POLL = 0.01
_MOVING = (*CONNECTED, State.CONNECTING)


class PeerCopies:
    """The copies of one run's memory on other hosts, in an evacuation (`scarctl.persist.evacuation.Copies`).

    A host counts only if it is connected, has a complete replica, and has answered since `hurry`: others may be dead.
    """

    def __init__(self, arena: Arena, senders: Sequence[Sender]) -> None:
        """Prepare. senders: those to the hosts that count, at least one."""
        self._arena = arena
        self._rounds = dict.fromkeys(senders, 0)
        """Number of the round that sends everything, by sender."""
        self._began = math.inf

    def hurry(self) -> None:
        """Have all senders send at once, the most changed per byte first."""
        arena = self._arena
        unsaved = arena.distance.astype(np.float32)
        unsaved[arena.saved == arena.moments] = 0.0  # the store has it
        self._began = time.monotonic()
        for sender in self._rounds:
            ids = order(unsaved, arena.layout.partition_bytes, sender.moments() == 0)
            rank = np.empty_like(ids)
            rank[ids] = np.arange(ids.size)
            self._rounds[sender] = sender.hurry(rank)

    def rest(self) -> None:
        """Have all senders return to the usual order."""
        for sender in self._rounds:
            sender.hurry(None)

    def head_start(self, seconds: float) -> None:
        """Wait at most `seconds` until every host has all of this memory that it can get, or is not reached at once."""
        self._wait(seconds, lambda sender, number: self._has_ended(sender, number) or self._is_lost(sender))

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until a host has all of this memory, or none can get more.

        Hosts that are not reached may be reached again until then.
        """
        self._wait(seconds, lambda sender, number: self._has_ended(sender, number) or self.complete())

    def _wait(self, seconds: float, done: Callable[[Sender, int], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(done(*one) for one in self._rounds.items()):
            time.sleep(_POLL)

    def _has_ended(self, sender: Sender, number: int) -> bool:
        return sender.has_ended(number) or sender.link.ended

    def _is_lost(self, sender: Sender) -> bool:
        """Return whether the host was not reached since `hurry`. An attempt that began before says nothing."""
        return sender.state not in _MOVING and sender.failed_at >= self._began

    def moments(self) -> Ids:
        """Return the moment of every copy that would survive: int64 (partitions,), 0 for none.

        A recovery takes the newest of these hosts' replicas, and no other. So unless a host has all of this memory, a
        copy counts only if each of them has it.
        """
        alive = self._alive()
        full = [sender for sender in alive if sender.has_acknowledged(self._rounds[sender])]
        here = self._arena.moments
        found = [np.where(sender.moments() == here, here, 0) for sender in full or alive]
        none: Ids = np.zeros(self._arena.layout.partitions, np.int64)
        newest: Ids = np.minimum.reduce(found) if found else none
        return newest

    def hosts(self) -> tuple[str, ...]:
        """Return the names of the hosts that have any of these copies."""
        return tuple(sender.host.host for sender in self._alive())

    def whole(self) -> str:
        """Return the name of the whole state in this memory if one of these hosts has it; otherwise ""."""
        return next((sender.whole for sender in self._alive() if sender.whole), "")

    def complete(self) -> bool:
        """Return whether one of these hosts has all of the memory at the time of `hurry`, the extras included."""
        return any(sender.has_acknowledged(self._rounds[sender]) for sender in self._alive())

    def _alive(self) -> list[Sender]:
        return [sender for sender in self._rounds if sender.vouched_at >= self._began]
