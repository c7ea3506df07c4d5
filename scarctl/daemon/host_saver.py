"""Save one run in the daemon: share its arena, serve its training process, and finish saving if that process dies."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from scarctl.arena.arena import Arena
from scarctl.arena.stale import reap_run
from scarctl.errors import Corruption, Unavailable, UsageError
from scarctl.persist.evacuated import Evacuated
from scarctl.persist.evacuation import Copies
from scarctl.persist.saver import LocalSaver
from scarctl.persist.thread import Current
from scarctl.store import Store

log = logging.getLogger("scarctl")


class HostSaver(LocalSaver):
    """Saves the copies that a training process makes in its arena, and acknowledges them there.

    Requests come from the training process's connection, `finish` and `release` from the daemon: one at a time.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        """Prepare, without opening the arena. folder: folder of the arena."""
        super().__init__(store)
        self._folder = folder
        self._lock = threading.Lock()
        self._released = self._adopted = self._looked = False
        self._loans = 0
        """Number of hosts to which the arena is being sent: nothing is saved meanwhile, so it does not change."""
        self.gives_way = False
        """A new training process waits for the store: `release` ends the current write."""

    def open_shared(self, *, again: bool) -> int:
        """Map the arena, open the store for writing, and return the epoch. The flags are those of `LocalSaver.open`.

        Raises Corruption if there is no arena, UsageError if the run is open or released, and whatever `open` raises.
        """
        with self._lock:
            if self._released or self.arena is not None:
                raise UsageError("this run is already open, or released", kind="not-claimed")
            arena = self._share()
            if arena is None:
                raise Corruption(
                    f"there is no arena in {self._folder}",
                    hint="the session creates it before it opens a run",
                )
            self.open(arena, again=again)
            return self.epoch

    @property
    def epoch(self) -> int:
        """Epoch of the run, once it is open."""
        assert self.arena is not None
        return self.arena.epoch

    def notify(self) -> None:
        """Wake the thread, if it runs."""
        if self.thread is not None and not self.stopped:
            super().notify()

    def stop(self) -> None:
        with self._lock:
            super().stop()

    def resume(self) -> None:
        """See `Saver`. Raises UsageError before the arena is open."""
        with self._lock:
            if self.arena is None:
                raise UsageError("open the run before you resume it")
            super().resume()

    def save_in_time(self, seconds: float, copies: Copies | None) -> Evacuated:
        """See `LocalSaver`. Raises Unavailable while saving is paused, or has not started."""
        with self._lock:
            if self.stopped or self._released:
                raise Unavailable("nothing is being saved to this store now", kind="not-saving")
        return super().save_in_time(seconds, copies)

    def roll_back(self, seq: int) -> None:
        """See `Saver`. Raises UsageError unless saving is stopped."""
        with self._lock:
            if self.arena is None or not self.stopped:
                raise UsageError("pause before you roll back")
            super().roll_back(seq)

    def adopt(self) -> None:
        """Note that the training process has died. If it never opened its run, open the arena of an earlier process.

        Raises whatever `open` raises.
        """
        with self._lock:
            try:
                if self.arena is None and not self._released:
                    arena = self._share()
                    if arena is not None:
                        self.open(arena)
            finally:
                self._adopted = True

    def finish(self) -> bool:
        """Continue saving after `adopt`, even if the training process died during a pause. Never waits.

        Returns whether all requests are durable, or saving has stopped permanently, or the store was deleted: what is
        left in memory then stays there for a day, in case a copy of the store is put back.
        """
        if not self._lock.acquire(blocking=False):
            return False  # the training process's last request is still being served
        try:
            if self._loans:
                return False
            if self.arena is None:
                return self._adopted
            super().resume()
            thread = self.thread
            if thread is not None and not self._looked:
                # The training process may have died before it asked for its last copies, or announced that.
                self._looked = True
                self.arena.adopt()
                thread.notify()
                return False
            if thread is not None and thread.store_deleted and thread.failure is None:
                log.warning("%s: the store was deleted: saving for its dead run has ended", self.store.url)
                return True
            return thread is None or thread.failure is not None or thread.settled
        finally:
            self._lock.release()

    @property
    def can_lend(self) -> bool:
        """Whether the arena may be lent: `adopt` no longer opens it."""
        return self.arena is not None or self._adopted

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Leave a dead process's arena as it is inside. Interrupts the current write; `finish` continues afterwards."""
        with self._lock:
            self._loans += 1
        try:
            with self._lock:
                if self.thread is not None and not self.stopped and not self._released:
                    self.store.blobs.hurry()
                    try:
                        super().stop()
                    finally:
                        self.store.blobs.close()  # ends the effect of `hurry`
            yield
        finally:
            with self._lock:
                self._loans -= 1

    def release(self) -> None:
        """Finish what is being written, and release the store. The arena stays for the next session.

        The arena of a dead run is removed if its store was deleted for certain, and another one is in its place:
        nothing in it can ever be saved.
        """
        with self._lock:
            self._released = True
            failure = self.failure
            replaced = failure is not None and failure.kind == "store-replaced"
            lost = self._adopted and replaced and self.store.is_deleted()
            try:
                self.close(Current.INTERRUPT if self.gives_way else Current.FINISH)
            finally:
                self.store.close()
                if self.arena is not None:
                    self.arena.close()
                if lost and reap_run(self._folder) is not None:
                    log.warning("%s: the memory of its dead run was removed", self.store.url)

    def _share(self) -> Arena | None:
        return Arena.share(self._folder, run_id=self.store.run_id)
