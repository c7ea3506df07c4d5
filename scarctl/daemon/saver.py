"""Who makes hand-overs durable: a thread of the session's own process, or the host's daemon (`daemon.client`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.daemon.handover import HandOverQueue
from scarctl.daemon.kinship import require_kinship
from scarctl.daemon.persister import Persister, reconcile
from scarctl.daemon.runner import PersisterThread
from scarctl.daemon.speed import Speed
from scarctl.errors import ScarError, Unavailable
from scarctl.store import Store, StoreWriter
from scarctl.store.saved import last_saved
from scarctl.version import NEVER


class Saver(Protocol):
    """The saving side of one run, as its session sees it. `claim`, then `open`, then the others, then `close`."""

    outlives: bool
    """Whether it goes on when this process dies."""

    def claim(self) -> None:
        """Make sure that nobody else writes to the store. Raises Contention, AccessDenied, Unavailable."""

    def open(self, arena: Arena, *, stopped: bool = False) -> None:
        """Start saving what is handed over in the arena's folder. Starts an epoch, and writes it into the arena.

        stopped: as after `stop`.

        Raises Contention, Fenced, Corruption, AccessDenied, Unavailable.
        """

    def notify(self) -> None:
        """Something was handed over."""

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all that was handed over is durable; returns whether it is."""

    def fault(self) -> ScarError:
        """Why something is not durable yet."""

    @property
    def failure(self) -> ScarError | None:
        """What made saving stop for good; None while it works."""

    @property
    def trouble(self) -> ScarError | None:
        """What keeps it from saving for some time already, while it goes on trying; None when nothing does."""

    @property
    def speed(self) -> Speed | None:
        """How fast the store takes what is handed over; None while that is not known."""

    def stop(self) -> None:
        """Write nothing to the store until `resume`. Does not wait for what is being written: that is put off."""

    def resume(self) -> None:
        """Go on after `stop`."""

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """While stopped: forget, in store and queue, what came after record `seqs[shard]` of every shard.

        Starts an epoch, and writes it into the arena.
        """

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        """Tell whoever asked for wish `number` what came of it."""

    def close(self, *, put_off: bool = False) -> None:
        """Finish what is being written and let go of the store. What waits stays in the queue.

        put_off: nobody waits: what is being written stays in the queue, too, or the daemon goes on with it.
        """

    def leave(self) -> None:
        """Go without waiting, as a process that dies does. The daemon makes durable what waits."""


class LocalSaver:
    """Saves from a thread of this process."""

    outlives = False

    def __init__(self, store: Store, on_saved: Callable[[Speed | None], None] = lambda _: None) -> None:
        """on_saved: called in the saving thread after every hand-over, with `speed`."""
        self._store = store
        self._on_saved = on_saved
        self._arena: Arena | None = None
        self._writer: StoreWriter | None = None
        self._thread: PersisterThread | None = None
        self._saved_at: str | None = None
        self.stopped = False
        self.shard_of: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        """Shard of every partition, int32 of shape (layout.partitions,), once open."""

    def claim(self) -> None:
        """Take the store's lock."""
        self._store.lock()

    def open(self, arena: Arena, *, again: bool = False, stopped: bool = False) -> None:
        """Open the store for writing and start the thread.

        again: the training process is the one that made the copies in the arena; it goes on making them.
        stopped: write nothing to the store until `resume`.
        """
        with contextlib.suppress(ScarError):  # for people only
            self._saved_at = last_saved(self._store)
        # A saver that may not save here must fence nobody: so this is asked before an epoch begins, and again after.
        require_kinship(arena, self._store.lines(), self._store, again=again)
        self.shard_of = self._store.shard_of(arena.layout)
        self._arena = arena
        self._writer = writer = self._store.writer(layout=arena.layout, shard_of=self.shard_of)
        try:
            require_kinship(arena, writer.lines, self._store, again=again)
        except BaseException:
            writer.close()
            raise
        stored = np.full(arena.layout.partitions, NEVER, dtype=np.int64)
        for state in writer.states.values():
            stored[state.ids] = state.version
        if not again:
            reconcile(arena, HandOverQueue(arena.folder), stored, writer.epoch)
            arena.base_epoch = writer.epoch
        arena.epoch = writer.epoch
        writer.accompany(arena)
        self.stopped = stopped
        if not stopped:
            self._start()

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
        """See `Saver`. The thread tells of its own: what fails is in its log."""
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
        """Start it again, if it was stopped."""
        if self.stopped:
            self._start()

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """See `Saver`."""
        assert self._arena is not None
        assert self._writer is not None
        self._writer.roll_back(seqs)
        HandOverQueue(self._arena.folder).clear()
        self._arena.epoch = self._arena.base_epoch = self._writer.epoch

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        """See `Saver`. Nobody asks: there is no daemon."""

    def close(self, *, put_off: bool = False) -> None:
        """See `Saver`."""
        if put_off:
            self._store.blobs.hurry()
        try:
            if self._thread is not None:
                self._thread.close(put_off=put_off)
            if self._writer is not None:
                self._writer.close()
        finally:
            if put_off:
                self._store.blobs.close()  # and so it has time again

    def leave(self) -> None:
        """See `Saver`. Here nobody would go on."""
        self.close()

    def _start(self) -> None:
        assert self._arena is not None
        assert self._writer is not None
        self.stopped = False
        persister = Persister(self._arena, self._writer, self.shard_of)
        if self._thread is not None:
            self._saved_at = self._thread.stats.saved_at
        self._thread = PersisterThread(persister, HandOverQueue(self._arena.folder), self._on_saved)
        self._thread.stats.saved_at = self._thread.stats.saved_at or self._saved_at

    def _running(self) -> PersisterThread:
        if self._thread is None:
            raise Unavailable("saving has not started")
        return self._thread
