"""Decide what a server of a replicated shard does: a pure state machine without clock, network or thread.

Servers of a shard form a chain. The head (the primary) orders pushes, each server applies them in that order and
forwards them, and the last one acknowledges. A record in the control plane names the chain and its epoch; it changes by
compare-and-swap only. Roles:

    STARTING -> RECOVERING -> REPLICA | PRIMARY -> FENCED -> RECOVERING

- A message carries the epoch of its sender's chain. A server refuses lower ones, and reads the record at higher ones.
- A server that has not reached the control plane for the session's time takes no pushes. The control plane drops a
  server only after that time. So no two primaries take pushes at once, whatever is frozen or cut off.
- A new server copies the last one's log, and joins behind it. It counts as a survivor once it has all that the server
  before it acknowledged (`Record.synced`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

SESSION = 2.0
"""Seconds without the control plane after which a server stops taking pushes, and may be replaced."""


class Role(Enum):
    """The present role of a server."""

    STARTING = "starting"
    RECOVERING = "recovering"
    REPLICA = "replica"
    PRIMARY = "primary"
    FENCED = "fenced"


@dataclass(frozen=True)
class Record:
    """The control plane's record of a shard."""

    epoch: int
    chain: tuple[str, ...]
    synced: frozenset[str]
    """The servers of the chain that have every push that was acknowledged before this record."""


@dataclass(frozen=True)
class Push:
    """A worker's update. Numbers of a worker ascend."""

    worker: str
    number: int
    value: Any


@dataclass(frozen=True)
class Sent:
    """A message. what: "push", "forward", "lacks", "ack", "refused", "copy" or "copied"."""

    to: str
    what: str
    epoch: int
    body: Any = None
    sender: str = ""


@dataclass(frozen=True)
class Swap:
    """Replace the record, if it is still the one of epoch `expected`."""

    expected: int
    record: Record


Action: TypeAlias = "Sent | Swap"


def successor(record: Record, alive: Iterable[str]) -> Record | None:
    """Return the record without those that are not alive; None if nothing changes, or no server has everything."""
    there = set(alive)
    chain = tuple(name for name in record.chain if name in there)
    synced = record.synced & there
    if chain == record.chain or not synced:
        return None
    return Record(record.epoch + 1, chain, synced)


@dataclass
class Server:
    """One server of a shard. Every method returns what is to be done."""

    name: str
    acknowledge: str = "all"
    """"all": the last of the chain acknowledges; "next": the second; "now": the primary itself."""
    every: int = 1
    """Pushes from one forwarding to the next; above 1 with "now" only."""
    role: Role = Role.STARTING
    log: list[Push] = field(default_factory=list)
    record: Record | None = None
    seen: float = float("-inf")
    """When it last reached the control plane."""
    applied: dict[str, int] = field(default_factory=dict)
    """Newest number of each worker in the log."""
    _joined: bool = False
    """Its log is that of a member: it has copied one, and has not been dropped since."""

    # -- the control plane ----------------------------------------------------------------------------------------

    def reached(self, record: Record, now: float, alive: Iterable[str]) -> list[Action]:
        """Take in the record. alive: the servers whose sessions have not ended."""
        self.seen = now
        actions: list[Action] = []
        if self.record is None or record.epoch > self.record.epoch:
            actions += self._adopt(record)
        elif self.role is Role.FENCED:
            self.role = self._place()
        following = self._next()
        if following is not None and following not in record.synced:
            actions += self._forward(len(self.log))  # no pushes, but it hears how many there are
        after = successor(record, alive)
        if after is not None and self.name in after.synced and self._joined:
            actions.append(Swap(record.epoch, after))
        elif self.role is not Role.RECOVERING:
            pass
        elif self.name in record.chain:
            # It was started again: what it had in memory is gone, so it is no longer a member.
            if record.synced - {self.name}:
                actions.append(Swap(record.epoch, without(record, self.name)))
        elif record.chain:
            actions.append(self._send(record.chain[-1], "copy"))
        else:
            self._joined = True
            actions.append(Swap(record.epoch, Record(record.epoch + 1, (self.name,), frozenset({self.name}))))
        return actions

    def _adopt(self, record: Record) -> list[Action]:
        self.record = record
        if self.name not in record.chain or not self._joined:
            # Its log may have pushes that no other server has: no whole chain has acknowledged them.
            self.role, self._joined = Role.RECOVERING, False
            self.log, self.applied = [], {}
            return []
        self.role = self._place()
        return self._forward(0) if self._next() else self._acknowledge_all()

    def _place(self) -> Role:
        assert self.record is not None
        return Role.PRIMARY if self.record.chain[0] == self.name else Role.REPLICA

    def tick(self, now: float) -> None:
        """Let time pass: without the control plane it is fenced."""
        if self.role in (Role.PRIMARY, Role.REPLICA) and now - self.seen >= SESSION:
            self.role = Role.FENCED

    # -- messages ---------------------------------------------------------------------------------------------

    def received(self, message: Sent, now: float) -> list[Action]:
        """Answer a message, or refuse it."""
        self.tick(now)
        mine = -1 if self.record is None else self.record.epoch
        if message.what == "push":
            return self._push(message)
        if message.what == "copied":
            return self._copied(message)
        if self.role not in (Role.PRIMARY, Role.REPLICA) or message.epoch != mine:
            return [self._send(message.sender, "refused", mine)] if message.epoch < mine else []
        if message.what == "copy" and not self._next():
            return [self._send(message.sender, "copied", list(self.log))]
        if message.what == "forward" and message.sender == self._before():
            return self._forwarded(*message.body)
        if message.what == "lacks" and message.sender == self._next():
            return self._forward(message.body)
        return []

    def _push(self, message: Sent) -> list[Action]:
        push: Push = message.body
        if self.role is not Role.PRIMARY or (self.record and message.epoch < self.record.epoch):
            epoch = -1 if self.record is None else self.record.epoch
            return [self._send(message.sender, "refused", epoch)]
        first = len(self.log)
        self._apply(push)
        if self.acknowledge == "now":
            actions: list[Action] = [self._acknowledge(push)]
            return actions + (self._forward(first) if len(self.log) % self.every == 0 else [])
        # A repeated one is sent along without being in the log again: its answer was lost.
        repeated = push if first == len(self.log) else None
        return self._forward(first, repeated) if self._next() else [self._acknowledge(push)]

    def _apply(self, push: Push) -> None:
        if push.number > self.applied.get(push.worker, -1):
            self.log.append(push)
            self.applied[push.worker] = push.number

    def _forward(self, first: int, last: Push | None = None) -> list[Action]:
        """Send the log from `first` on to the next one. The first message of an epoch is all of it."""
        following = self._next()
        if following is None:
            return []
        start = 0 if self.every > 1 else first
        return [self._send(following, "forward", (start, self.log[start:], last))]

    def _forwarded(self, first: int, pushes: list[Push], last: Push | None) -> list[Action]:
        assert self.record is not None
        before = self._before()
        assert before is not None
        if first > len(self.log):
            return [self._send(before, "lacks", len(self.log))]  # an earlier one was lost
        if self.log[first : first + len(pushes)] != pushes[: len(self.log) - first]:
            del self.log[first:]  # pushes that only a dead primary had acknowledged
            self._count()
        for push in pushes[len(self.log) - first :]:
            self._apply(push)
        actions: list[Action] = []
        record = self.record
        if self.name not in record.synced and before in record.synced:
            synced = record.synced | {self.name}
            actions.append(Swap(record.epoch, Record(record.epoch + 1, record.chain, synced)))
        done = [*pushes, last] if last else pushes
        if self._next() is not None:
            actions += self._forward(first, last)
        if (self.acknowledge == "all" and self._next() is None) or (
            self.acknowledge == "next" and self._second()
        ):
            actions += [self._acknowledge(push) for push in done]
        return actions

    def _acknowledge_all(self) -> list[Action]:
        """Acknowledge the newest pushes, as the new last server of the chain."""
        newest = [push for push in self.log if self.applied[push.worker] == push.number]
        return [self._acknowledge(push) for push in newest] if self.acknowledge != "now" else []

    def _acknowledge(self, push: Push) -> Sent:
        return self._send(push.worker, "ack", push)

    def _copied(self, message: Sent) -> list[Action]:
        record = self.record
        if (
            self.role is not Role.RECOVERING
            or record is None
            or message.epoch != record.epoch
            or self.name in record.chain
        ):
            return []
        self.log, self._joined = list(message.body), True
        self._count()
        return [Swap(record.epoch, Record(record.epoch + 1, (*record.chain, self.name), record.synced))]

    def _count(self) -> None:
        self.applied = {}
        for push in self.log:
            self.applied[push.worker] = push.number

    def _next(self) -> str | None:
        chain = self.record.chain if self.record else ()
        at = chain.index(self.name) + 1 if self.name in chain else len(chain)
        return chain[at] if at < len(chain) else None

    def _before(self) -> str | None:
        chain = self.record.chain if self.record else ()
        at = chain.index(self.name) if self.name in chain else 0
        return chain[at - 1] if at else None

    def _second(self) -> bool:
        return self.record is not None and self.record.chain.index(self.name) == 1

    def _send(self, to: str, what: str, body: Any = None) -> Sent:
        return Sent(to, what, -1 if self.record is None else self.record.epoch, body, self.name)


def without(record: Record, name: str) -> Record:
    """Return the next record, without this server."""
    chain = tuple(other for other in record.chain if other != name)
    return Record(record.epoch + 1, chain, record.synced - {name})
