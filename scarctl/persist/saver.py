"""Define what saves for a session, and save from a thread of the session's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.kinship import require_kinship
from scarctl.arena.queue import HandOverQueue
from scarctl.errors import ScarError, Unavailable
from scarctl.persist.persister import Persister, reconcile
from scarctl.persist.speed import Speed
from scarctl.persist.thread import PersisterThread
from scarctl.store import Store, StoreWriter, open_writer
from scarctl.store.saved import last_saved


class Saver(Protocol):
    """The saving side of one run, as its session sees it. `claim`, `open`, `resume`, then the others, then `close`."""

    outlives: bool
    """Whether saving continues when this process dies."""

    def claim(self) -> None:
        """Make sure that nobody else writes to the store. Raises Contention, AccessDenied, Unavailable."""

    def open(self, arena: Arena) -> None:
        """Open the store for writing: begin an epoch, and write it into the arena. Nothing is saved before `resume`.

        Raises Contention, Fenced, Corruption, AccessDenied, Unavailable.
        """

    def notify(self) -> None:
        """Look at the queue: something was handed over."""

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all that was handed over is durable; returns whether it is."""

    def fault(self) -> ScarError:
        """Return why something is not durable yet."""

    @property
    def failure(self) -> ScarError | None:
        """The error that made saving stop for good; None while it works."""

    @property
    def trouble(self) -> ScarError | None:
        """The error that has kept it from saving for some time, while it tries again; None if there is none."""

    @property
    def speed(self) -> Speed | None:
        """How fast the store takes what is handed over; None while that is not known."""

    def stop(self) -> None:
        """Write nothing to the store until `resume`. Does not wait for what is being written: that is put off."""

    def resume(self) -> None:
        """Save what is handed over in the arena's folder: after `open`, and again after `stop`."""

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """Forget, in store and queue, what came after record `seqs[shard]` of every shard. Only while stopped.

        Starts an epoch, and writes it into the arena.
        """

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        """Answer wish `number` of a command with its outcome."""

    def close(self, *, put_off: bool = False) -> None:
        """Finish what is being written and let go of the store. What waits stays in the queue.

        put_off: do not wait: what is being written stays in the queue, too, or the daemon continues with it.
        """

    def leave(self) -> None:
        """Go without waiting, as a process that dies does. The daemon makes durable what waits."""


class LocalSaver:
    """Saves from a thread of this process."""

    outlives = False

    def __init__(self, store: Store, on_saved: Callable[[Speed | None], None] = lambda _: None) -> None:
        """on_saved: called in the saving thread after every hand-over, with `speed`."""
        self.store = store
        self._on_saved = on_saved
        self.arena: Arena | None = None
        """Once open."""
        self._writer: StoreWriter | None = None
        self._thread: PersisterThread | None = None
        self._saved_at: str | None = None
        self.stopped = True
        self.shard_of: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        """Shard of every partition, int32 of shape (layout.partitions,), once open."""

    def claim(self) -> None:
        """Take the store's lock."""
        self.store.lock()

    def open(self, arena: Arena, *, again: bool = False) -> None:
        """See `Saver`. again: the training process is the one that made the copies in the arena, and makes more."""
        with contextlib.suppress(ScarError):  # for people only
            self._saved_at = last_saved(self.store)
        # A saver that may not save here must fence nobody: so this is asked before an epoch begins, and again after.
        require_kinship(arena, self.store.lines(), self.store, again=again)
        self.shard_of = self.store.shard_of(arena.layout)
        self._writer = writer = open_writer(self.store, layout=arena.layout, shard_of=self.shard_of)
        try:
            require_kinship(arena, writer.lines, self.store, again=again)
        except BaseException:
            writer.close()
            raise
        if not again:
            reconcile(arena, HandOverQueue(arena.folder), writer.states, writer.epoch)
        arena.begin_epoch(writer.epoch, again=again)
        writer.accompany(arena)
        self.arena = arena
        self.stopped = True

    def notify(self) -> None:
        """Wake the thread."""
        self._running().notify()

    def drain(self, timeout: float) -> bool:
        """See `Saver`."""
        return self._running().drain(timeout)

    def fault(self) -> ScarError:
        """See `Saver`."""
        return self._running().fault()

    @property
    def failure(self) -> ScarError | None:
        """See `Saver`."""
        return self._thread.failure if self._thread is not None else None

    @property
    def trouble(self) -> ScarError | None:
        """See `Saver`. None: the thread logs what fails."""
        return None

    @property
    def speed(self) -> Speed | None:
        """See `Saver`."""
        return self._thread.speed if self._thread is not None else None

    @property
    def thread(self) -> PersisterThread | None:
        """The thread, for its figures; None before it was started."""
        return self._thread

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close(put_off=True)
        self.stopped = True

    def resume(self) -> None:
        """Start the thread, unless it runs."""
        if self.stopped:
            self._start()

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """See `Saver`."""
        assert self.arena is not None
        assert self._writer is not None
        self._writer.roll_back(seqs)
        HandOverQueue(self.arena.folder).clear()
        self.arena.begin_epoch(self._writer.epoch)

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        """See `Saver`. Nobody asks: there is no daemon."""

    def close(self, *, put_off: bool = False) -> None:
        """See `Saver`."""
        if put_off:
            self.store.blobs.hurry()
        try:
            if self._thread is not None:
                self._thread.close(put_off=put_off)
            if self._writer is not None:
                self._writer.close()
        finally:
            if put_off:
                self.store.blobs.close()  # and so it has time again

    def leave(self) -> None:
        """See `Saver`. No other process would continue."""
        self.close()

    def _start(self) -> None:
        assert self.arena is not None
        assert self._writer is not None
        self.stopped = False
        persister = Persister(self.arena, self._writer, self.shard_of)
        if self._thread is not None:
            self._saved_at = self._thread.stats.saved_at
        self._thread = PersisterThread(persister, HandOverQueue(self.arena.folder), self._on_saved)
        self._thread.stats.saved_at = self._thread.stats.saved_at or self._saved_at

    def _running(self) -> PersisterThread:
        if self._thread is None:
            raise Unavailable("saving has not started")
        return self._thread
