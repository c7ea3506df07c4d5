"""One run in the daemon: its store, its arena, and the thread that saves it."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.daemon.handover import HandOverQueue
from scarctl.daemon.lifecycle import Phase
from scarctl.daemon.persister import adopt_orphans
from scarctl.daemon.runner import PersisterStats
from scarctl.daemon.saver import LocalSaver
from scarctl.daemon.speed import Speed
from scarctl.errors import Corruption, ScarError, UsageError
from scarctl.store import Store, newest_topology
from scarctl.version import NEVER, step_of
from scarctl.wishes import Wish

log = logging.getLogger("scarctl")

MAX_SHARDS_SHOWN = 1024
_ANSWERS = 16
_SPEED_PAUSE = 0.25
"""Seconds between two messages to the session about the speed of saving, at least."""


class _Speeds:
    """Sends a session now and then how fast its hand-overs become durable. Not the run's: that would be a cycle."""

    def __init__(self, events: queue.SimpleQueue[dict[str, Any]]) -> None:
        self._events = events
        self._sent = 0.0

    def __call__(self, speed: Speed | None) -> None:
        """A hand-over is durable."""
        now = time.monotonic()
        if speed is not None and now > self._sent + _SPEED_PAUSE:
            self._sent = now
            self._events.put({"speed": speed.to_json()})


class Run:
    """Saving for one store. The training process owns the arena; this side reads it and acknowledges.

    Requests come from the training process's connection, `finish` and `release` from the daemon: one at a time.
    """

    def __init__(self, store: Store, folder: Path, pid: int, owner: object) -> None:
        self.id = store.run_id
        self.store = store
        self.pid = pid
        """The training process, 0 when the system does not say."""
        self.owner = owner
        """The connection of the training process."""
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """What the training process is to be told."""
        self.answers: dict[int, dict[str, Any]] = {}
        """What the training process has said to the newest wishes, by their number."""
        self._wishes = 0
        self._folder = folder
        self._saver = LocalSaver(store, _Speeds(self.events))
        self._arena: Arena | None = None
        self._lock = threading.Lock()
        self._released = self._adopted = self._looked = self._put_off = False
        self._rank: int | None = None

    def open(self, *, again: bool, stopped: bool) -> int:
        """Map the arena and start saving; returns the epoch. Flags as for `LocalSaver.open`.

        Raises Corruption when there is no arena, and what that raises.
        """
        with self._lock:
            if self._released or self._arena is not None:
                raise UsageError("this run is open already, or let go", kind="not-claimed")
            arena = Arena.share(self._folder, run_id=self.id)
            if arena is None:
                raise Corruption(
                    f"there is no arena in {self._folder}", hint="the session makes it before it opens a run"
                )
            self._saver.open(arena, again=again, stopped=stopped)
            self._arena = arena
            self._rank = _rank_in(self.store)
            return arena.epoch

    def ask(self, wish: Wish) -> int:
        """Pass a wish on to the training process; returns its number."""
        self._wishes += 1
        self.events.put({"wish": replace(wish, number=self._wishes).to_json()})
        return self._wishes

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Keep what the training process says to a wish."""
        self.answers[number] = answer
        for old in sorted(self.answers)[:-_ANSWERS]:
            del self.answers[old]

    def notify(self) -> None:
        """Something was handed over."""
        if self._arena is not None and not self._saver.stopped:
            self._saver.notify()

    def drain(self, timeout: float) -> bool:
        """See `Saver.drain`."""
        return self._saver.drain(timeout)

    def fault(self) -> ScarError:
        """See `Saver.fault`."""
        return self._saver.fault()

    def stop(self) -> None:
        """See `LocalSaver.stop`."""
        with self._lock:
            self._saver.stop()

    def resume(self) -> None:
        """See `LocalSaver.resume`."""
        with self._lock:
            self._saver.resume()

    def roll_back(self, seqs: Mapping[int, int]) -> int:
        """See `Saver.roll_back`; returns the new epoch. Raises UsageError unless saving is stopped."""
        with self._lock:
            if self._arena is None or not self._saver.stopped:
                raise UsageError("pause before you roll back")
            self._saver.roll_back(seqs)
            return self._arena.epoch

    @property
    def failure(self) -> ScarError | None:
        """See `Saver.failure`."""
        return self._saver.failure

    def trainer_lives(self) -> bool:
        """Whether the training process exists. Where that is not known, its connection has to tell."""
        try:
            if self.pid:
                os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def adopt(self) -> None:
        """The training process has gone. If it died before it opened its run: what an earlier one left in the arena is
        made durable all the same. Raises what `open` raises.
        """
        with self._lock:
            try:
                if self._arena is None and not self._released:
                    arena = Arena.share(self._folder, run_id=self.id)
                    if arena is not None:
                        self._saver.open(arena)
                        self._arena = arena
            finally:
                self._adopted = True

    def finish(self) -> bool:
        """The training process has gone, perhaps in the middle of a pause: go on. After `adopt`.

        Returns whether nothing waits for the store any more, or saving has stopped for good. Never waits itself.
        """
        if not self._lock.acquire(blocking=False):
            return False  # its last request is still being served
        try:
            if self._arena is None:
                return self._adopted
            self._saver.resume()
            thread = self._saver.thread
            if thread is not None and not self._looked:
                # What it copied last it may not have lived to put into the queue, or to announce.
                self._looked = True
                try:
                    adopt_orphans(self._arena, HandOverQueue(self._arena.folder))
                except ScarError as error:
                    log.error("%s: what was copied last stays in memory: %s", self.store.url, error)
                thread.notify()
                return False
            return thread is None or thread.failure is not None or thread.settled
        finally:
            self._lock.release()

    def put_off(self) -> None:
        """A new training process waits for the store: `release` is not to finish what is being written."""
        self._put_off = True

    def release(self) -> None:
        """Finish what is being written; free the store. The arena stays for the next session."""
        with self._lock:
            self._released = True
            try:
                self._saver.close(put_off=self._put_off)
            finally:
                self.store.close()
                if self._arena is not None:
                    self._arena.close()

    def status(self, phase: Phase) -> dict[str, Any]:
        """Figures for `scarctl daemon status`. Steps are -1 where nothing is durable yet."""
        known: dict[str, Any] = {
            "store": self.store.url,
            "id": self.id,
            "pid": self.pid,
            "phase": phase.value,
        }
        if self.store.part is not None:
            known |= {"shard": self.store.part.shard, "rank": self._rank}
        arena = self._arena
        if arena is None:
            return {**known, "open": False, "peers": []}
        thread = self._saver.thread
        stats = thread.stats if thread is not None else PersisterStats()
        fault = thread.failure or thread.last_error if thread is not None else None
        pending = arena.pending()
        # What is durable equals the live values of the newest sealed step as well.
        durable = np.where(arena.durable >= 0, np.maximum(arena.durable, arena.sealed), np.int64(NEVER))
        seconds = max(stats.busy_seconds, 1e-9)
        return {
            **known,
            "open": True,
            "head_step": arena.head_step,
            "durable_step": step_of(int(durable.max(initial=NEVER))),
            "oldest_durable_step": step_of(int(durable.min(initial=durable.max(initial=NEVER)))),
            "shards": self._shards(durable),
            "queued_partitions": int(pending.sum()),
            "queued_bytes": int(arena.layout.partition_bytes[pending].sum()),
            "saved_at": stats.saved_at,
            "saved_bytes": stats.nbytes,
            "bytes_per_second": int(stats.nbytes / seconds),
            "speed": thread.speed.to_json() if thread is not None and thread.speed is not None else None,
            "space": thread.space if thread is not None else None,
            "errors": stats.errors,
            "last_error": str(fault) if fault is not None else None,
            "stopped": self._saver.failure is not None,
            "peers": [],
        }

    def _shards(self, durable: NDArray[np.int64]) -> list[dict[str, int]] | None:
        """Newest and oldest durable step of every shard; None when there are too many to list."""
        shards, index = np.unique(self._saver.shard_of, return_inverse=True)
        if len(shards) > MAX_SHARDS_SHOWN:
            return None
        newest = np.full(len(shards), NEVER, dtype=np.int64)
        oldest = np.full(len(shards), np.iinfo(np.int64).max, dtype=np.int64)
        np.maximum.at(newest, index, durable)
        np.minimum.at(oldest, index, durable)
        oldest = np.minimum(oldest, newest)  # a shard without a partition
        return [
            {"shard": shard, "durable_step": new, "oldest_durable_step": old}
            for shard, (new, old) in enumerate(
                zip(step_of(newest).tolist(), step_of(oldest).tolist(), strict=True)
            )
        ]


def _rank_in(store: Store) -> int | None:
    """The rank that saves to this part of a store, for people; None where that is not known."""
    if store.part is None:
        return None
    try:
        topology = newest_topology(store)
    except ScarError as error:
        log.warning("%s: %s", store.url, error)
        return None
    known = topology is not None and store.part.shard in topology.shards
    return topology.shards.index(store.part.shard) if topology is not None and known else None
