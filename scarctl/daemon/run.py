"""One run in the daemon: its store, its arena, and the thread that saves it."""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scarctl.daemon.arena import Arena
from scarctl.daemon.saver import LocalSaver
from scarctl.errors import Corruption, ScarError
from scarctl.store import Store
from scarctl.version import step_of


class Run:
    """Saving for one store. The training process owns the arena; this side reads it and acknowledges."""

    def __init__(self, store: Store, folder: Path, pid: int, owner: object) -> None:
        self.id = store.id
        self.pid = pid
        self.owner = owner
        """The connection of the training process."""
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """What the training process is to be told."""
        self._store = store
        self._folder = folder
        self._saver = LocalSaver(store)
        self._arena: Arena | None = None

    def open(self, *, again: bool) -> int:
        """Map the arena and start saving; returns the epoch. Raises Corruption when there is no arena."""
        arena = Arena.share(self._folder, store_id=self.id)
        if arena is None:
            raise Corruption(
                f"there is no arena in {self._folder}", hint="the session makes it before it opens a run"
            )
        self._saver.open(arena, again=again)
        self._arena = arena
        return arena.epoch

    def notify(self) -> None:
        """Something was handed over."""
        self._saver.notify()

    def drain(self, timeout: float) -> bool:
        """See `Saver.drain`."""
        return self._saver.drain(timeout)

    def fault(self) -> ScarError:
        """See `Saver.fault`."""
        return self._saver.fault()

    def stop(self) -> None:
        """See `LocalSaver.stop`."""
        self._saver.stop()

    def resume(self) -> None:
        """See `LocalSaver.resume`."""
        self._saver.resume()

    def roll_back(self, seqs: Mapping[int, int]) -> int:
        """See `Saver.roll_back`; returns the new epoch."""
        self._saver.roll_back(seqs)
        assert self._arena is not None
        return self._arena.epoch

    @property
    def failure(self) -> ScarError | None:
        """See `Saver.failure`."""
        return self._saver.failure

    def trainer_lives(self) -> bool:
        """Whether the training process exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def orphan(self) -> bool:
        """The training process has gone, and perhaps in the middle of a pause. Returns whether nothing waits."""
        if self._arena is not None and self._saver.stopped:
            self._saver.resume()
        return self.settled()

    def settled(self) -> bool:
        """Whether nothing waits for the store any more, or saving has stopped for good."""
        return self._arena is None or self._saver.failure is not None or self._saver.thread.settled

    def release(self) -> None:
        """Finish what is being written; free the store. The arena stays for the next session."""
        self._saver.close()
        self._store.close()
        if self._arena is not None:
            self._arena.close()

    def status(self, phase: str) -> dict[str, Any]:
        """Figures for `scarctl daemon status`."""
        known = {"store": self._store.url, "id": self.id, "pid": self.pid, "phase": phase}
        arena = self._arena
        if arena is None:
            return known
        stats = self._saver.thread.stats
        pending = arena.pending()
        fault = self._saver.thread.last_error
        seconds = max(stats.busy_seconds, 1e-9)
        return known | {
            "head_step": arena.head_step,
            "durable_step": int(step_of(int(arena.durable.max(initial=-1)))),
            "oldest_durable_step": int(step_of(int(arena.durable.min(initial=-1)))),
            "queued_partitions": int(pending.sum()),
            "queued_bytes": int(arena.layout.partition_bytes[pending].sum()),
            "saved_bytes": stats.nbytes,
            "bytes_per_second": int(stats.nbytes / seconds) if stats.nbytes else 0,
            "errors": stats.errors,
            "last_error": str(fault) if fault is not None else None,
            "peers": [],
        }
