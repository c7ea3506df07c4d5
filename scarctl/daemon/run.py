"""Describe one run in the daemon: its training process, the requests to it, and how far it is durable."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.durability import durability
from scarctl.daemon.host_saver import HostSaver
from scarctl.daemon.lifecycle import Phase
from scarctl.daemon.request import Request
from scarctl.daemon.status import NO_HOST, RunStatus, ShardSteps
from scarctl.errors import Contention, ScarError, Unavailable, UsageError
from scarctl.peers.evacuation import HEAD_START, PeerCopies
from scarctl.peers.link import CONNECTED
from scarctl.peers.sender import Candidate, Places, Sender, Source
from scarctl.persist.evacuated import Evacuated
from scarctl.persist.evacuation import STORE_ONLY, before, not_evacuated, unknown_host
from scarctl.persist.thread import PersisterStats
from scarctl.state.version import NEVER, step_of
from scarctl.store import Store, newest_topology
from scarctl.util.process import exists

log = logging.getLogger("scarctl")

MAX_SHARDS_SHOWN = 1024
_ANSWERS = 16
_SPARE = 8
"""Candidates in reserve for hosts that cannot keep copies. Further hosts only serve evacuations."""
_LAST_ROUND = 5.0
"""Seconds to bring the peers up to date when a run ends."""
_ACK_PAUSE = 0.002
"""Seconds between two checks whether a peer has acknowledged."""
_RETRY_SECONDS, _RETRY_PAUSE = 1.0, 0.05
"""Seconds for which an evacuation waits for peers until it checks again whether the store is saved to; and at least."""


class Owner(Protocol):
    """The connection of a training process."""

    def hung_up(self) -> bool:
        """Return whether the training process has ended the connection."""


class Run:
    """A training process that saves to one store. `saver` saves the copies in its arena."""

    def __init__(self, store: Store, folder: Path, pid: int, owner: Owner) -> None:
        self.id = store.run_id
        self.store = store
        self.pid = pid
        """Process id of the training process; 0 if unknown."""
        self.owner = owner
        """The connection of the training process."""
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """Messages for the training process."""
        self.answers: dict[int, dict[str, Any]] = {}
        """Answers of the training process to the newest requests, by their number."""
        self._asked = 0
        self._tokens: dict[str, int] = {}
        self.saver = HostSaver(store, folder)
        self.closed = False
        """Whether the training process ended by closing its session."""
        self._senders: list[Sender] = []
        self._others: tuple[Candidate, ...] = ()
        """All hosts that may keep copies."""
        self._source: Source | None = None
        self._places = Places()
        self._copies = 0
        """Number of hosts that are to keep copies."""
        self._evacuating = 0
        self._senders_lock = threading.RLock()
        self._rank: int | None = None
        self._is_member = False

    def open(self, *, again: bool) -> int:
        """Open the store for writing, and return the epoch. See `HostSaver.open_shared`."""
        epoch = self.saver.open_shared(again=again)
        self._rank, self._is_member = _rank_in(self.store)
        return epoch

    def ask(self, request: Request, token: str = "") -> int:
        """Pass a request to the training process, and return its number.

        token: identifies the request, "" if it is never repeated. A request that was passed on is not passed on again.
        """
        if token and token in self._tokens:
            return self._tokens[token]
        self._asked += 1
        self.events.put({"request": replace(request, number=self._asked).to_json()})
        if token:
            self._tokens[token] = self._asked
            for old in list(self._tokens)[:-_ANSWERS]:
                del self._tokens[old]
        return self._asked

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Keep the training process's answer to a request."""
        self.answers[number] = answer
        for old in sorted(self.answers)[:-_ANSWERS]:
            del self.answers[old]

    def send_to(self, source: Source, candidates: Sequence[Candidate], copies: int) -> None:
        """Keep copies of the arena on other hosts, by the best of the candidates. Raises UsageError before `open`.

        Complete copies on the best ones continue: then only the other candidates are noted, for an evacuation.

        Raises Contention during an evacuation that has links, because it needs them as they are.
        """
        arena = self.saver.arena
        if arena is None:
            raise UsageError("open the run before its memory is sent to peers")
        with self._senders_lock:
            if self._evacuating and self._senders:
                raise Contention(f"{self.id}: its memory is evacuated", hint="retry later")
            others = _distinguished(candidates)
            if self._has_copies_on(source, others, copies):
                self._others = others
                return
            self._stop_senders(done=False, patience=0.0)
            self._source, self._others, self._copies = source, others, copies
            self._places = Places()
            first, spare = self._others[:copies], self._others[copies : copies + _SPARE]
            for n, host in enumerate(first):
                # Any spare host may replace any of the first ones, and a first one that has become free another.
                self._send(source, [host, *spare, *first[n + 1 :], *first[:n]], arena)

    def _has_copies_on(self, source: Source, others: Sequence[Candidate], copies: int) -> bool:
        """Return whether these hosts already have complete copies, and receive what changes."""
        return (
            self._source is not None
            and self._source.describes_as(source)
            and self._copies == copies
            and {sender.host for sender in self._senders} >= set(others[:copies]) != set()
            and all(
                sender.link.complete and sender.state in CONNECTED and sender.host in others
                for sender in self._senders
            )
        )

    def _send(self, source: Source, candidates: Sequence[Candidate], arena: Arena) -> Sender:
        sender = Sender(source, candidates, arena, lambda text: self.events.put({"warn": text}), self._places)
        sender.start()
        self._senders.append(sender)
        return sender

    def evacuate(self, seconds: float, to: str | None) -> Evacuated:
        """Save the run's memory to other hosts, then to the store, within `seconds`: see `Session.evacuate`.

        Raises UsageError (`kind` "unknown-host"); without peers Unavailable while nothing is saved.
        """
        with self._senders_lock:
            self._evacuating += 1
        try:
            return self._evacuate(seconds, to)
        finally:
            with self._senders_lock:
                self._evacuating -= 1

    def _evacuate(self, seconds: float, to: str | None) -> Evacuated:
        ends = time.monotonic() + seconds
        senders = self._senders_to(to)
        arena = self.saver.arena
        if arena is None or not senders:
            return self.saver.save_in_time(seconds, None)
        copies = PeerCopies(arena, senders)
        copies.hurry()
        try:
            copies.head_start(HEAD_START * seconds)
            while True:
                try:
                    return self.saver.save_in_time(max(0.0, ends - time.monotonic()), copies)
                except Unavailable as error:  # nothing is saved now, and the peers continue
                    found = not_evacuated(arena, error, copies)
                left = before(ends, seconds) - time.monotonic()
                if found.safe or left <= 0:
                    return found
                copies.wait(min(left, _RETRY_SECONDS))
                time.sleep(min(left, _RETRY_PAUSE))
        finally:
            copies.rest()

    def _senders_to(self, to: str | None) -> list[Sender]:
        """Return the senders to the hosts that count in an evacuation. Starts another one if `to` has no copy yet."""
        if to == STORE_ONLY:
            return []
        with self._senders_lock:
            if to is None:
                return list(self._senders)
            known = [
                one for one in self._others if to in (one.host, one.address, f"{one.address}:{one.port}")
            ]
            if len(known) != 1:
                raise unknown_host(to, [one.host for one in known or self._others])
            (host,) = known
            if (sender := self._places.user_of(host)) is not None:
                return [sender]
            arena = self.saver.arena
            if self._source is None or arena is None:
                return []
            return [self._send(self._source, [host], arena)]

    def links(self) -> list[dict[str, Any]]:
        """Return address, port and state of each link, and whether the host there has a complete copy."""
        return [
            {
                "address": sender.host.address,
                "port": sender.host.port,
                "state": sender.state.value,
                "complete": sender.link.complete,
            }
            for sender in self._senders
        ]

    def await_peers(self, count: int, seconds: float) -> tuple[int, list[str]]:
        """Wait until `count` peers have the arena's present content, or clearly will not get it.

        Returns the number of peers that have it, and all links in words.
        """
        until = time.monotonic() + seconds
        asked = [(sender, sender.ask()) for sender in self._senders]
        while True:
            have = sum(sender.has_acknowledged(number) for sender, number in asked)
            possible = sum(
                sender.has_acknowledged(number) or not sender.link.ended for sender, number in asked
            )
            if have >= count or have == possible < count or time.monotonic() >= until:
                return have, [sender.describe() for sender, _ in asked]
            time.sleep(_ACK_PAUSE)

    def end_sending(self) -> None:
        """End the links once the peers are up to date, or after some seconds."""
        arena = self.saver.arena
        done = self.closed and arena is not None and not (arena.lacking() or arena.waits)
        self._stop_senders(done=done, patience=0.0 if self.saver.gives_way else _LAST_ROUND)

    def _stop_senders(self, *, done: bool, patience: float) -> None:
        with self._senders_lock:
            senders, self._senders = self._senders, []
        until = time.monotonic() + patience
        for sender in senders:
            sender.close(done=done, patience=max(0.0, until - time.monotonic()))

    def trainer_lives(self) -> bool:
        """Return whether the training process exists; True if its process id is unknown."""
        return not self.pid or exists(self.pid)

    def in_use(self) -> bool:
        """Return whether the training process exists, and has not ended its connection.

        A busy daemon may read the session's farewell later than the next session's claim.
        """
        return self.trainer_lives() and not self.owner.hung_up()

    def status(self, phase: Phase) -> RunStatus:
        """Return the figures for `scarctl daemon status`."""
        status: RunStatus = {
            "store": self.store.url,
            "id": self.id,
            "pid": self.pid,
            "phase": phase.value,
            "open": False,
            "peers": self._described(),
        }
        if self.store.part is not None:
            status["shard"], status["rank"] = self.store.part.shard, self._rank
            status["member"] = self._is_member
        arena = self.saver.arena
        if arena is None:
            return status
        thread = self.saver.thread
        stats = thread.stats if thread is not None else PersisterStats()
        fault = thread.failure or thread.last_error if thread is not None else None
        known = durability(arena)
        seconds = max(stats.busy_seconds, 1e-9)
        figures: RunStatus = {
            **status,
            "open": True,
            "head_step": arena.head_step,
            "durable_step": known.durable_step,
            "oldest_durable_step": known.oldest_durable_step,
            "sealed_step": known.sealed_step,
            "shards": self._shards(known.versions),
            "queued_partitions": known.pending_partitions,
            "queued_bytes": known.pending_bytes,
            "saved_at": stats.saved_at,
            "saved_bytes": stats.nbytes,
            "bytes_per_second": int(stats.nbytes / seconds),
            "space": thread.space if thread is not None else None,
            "errors": stats.errors,
            "last_error": str(fault) if fault is not None else None,
            "stopped": self.saver.failure is not None,
        }
        return figures

    def _described(self) -> list[str]:
        """Return the copies on other hosts in words, also those for which there is no host yet."""
        found = [sender.describe() for sender in self._senders]
        return found + [NO_HOST] * (self._copies - len(found))

    def _shards(self, durable: NDArray[np.int64]) -> list[ShardSteps] | None:
        """Return the newest and oldest durable step of every shard; None if there are too many to list."""
        shards, index = np.unique(self.saver.shard_of, return_inverse=True)
        if len(shards) > MAX_SHARDS_SHOWN:
            return None
        newest = np.full(len(shards), NEVER, dtype=np.int64)
        oldest = np.full(len(shards), np.iinfo(np.int64).max, dtype=np.int64)
        np.maximum.at(newest, index, durable)
        np.minimum.at(oldest, index, durable)
        return [
            {"shard": shard, "durable_step": new, "oldest_durable_step": old}
            for shard, new, old in zip(
                shards.tolist(), step_of(newest).tolist(), step_of(oldest).tolist(), strict=True
            )
        ]


def _distinguished(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates with names that differ: hosts that share a name get their addresses as well."""
    names = Counter(one.host for one in candidates)
    places = Counter((one.host, one.address) for one in candidates)
    return tuple(
        one
        if names[one.host] == 1
        else replace(one, host=f"{one.host} ({one.address})")
        if places[one.host, one.address] == 1
        else replace(one, host=f"{one.host} ({one.address}:{one.port})")
        for one in candidates
    )


def _rank_in(store: Store) -> tuple[int | None, bool]:
    """Return the rank or member that saves to this part of a store, None if unknown; and whether it is a member."""
    if store.part is None:
        return None, False
    try:
        topology = newest_topology(store)
    except ScarError as error:
        log.warning("%s: %s", store.url, error)
        return None, False
    if topology is None or store.part.shard not in topology.shards:
        return None, False
    return topology.shards.index(store.part.shard), topology.independent
