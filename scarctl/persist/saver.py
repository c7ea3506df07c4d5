"""Define the saver of a session, and implement one with a thread of the session's process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.folder import note_site
from scarctl.arena.kinship import require_kinship
from scarctl.errors import ScarError, Unavailable
from scarctl.persist.persister import Persister
from scarctl.persist.thread import Current, PersisterThread
from scarctl.state.version import NEVER, pack, step_of
from scarctl.store import ShardState, Store, StoreWriter, open_writer
from scarctl.store.saved import last_saved

if TYPE_CHECKING:
    from scarctl.persist.evacuated import Evacuated
    from scarctl.persist.evacuation import Copies


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The copies that other hosts have of this host's memory at one moment."""

    have: int
    """Number of hosts that have the whole memory."""
    links: tuple[str, ...]
    """The copies on other hosts, in words: "b: following, 4 behind"."""


class Saver(Protocol):
    """The saver of one run. Call `claim`, `open`, `resume`, then the others, then `close`."""

    outlives: bool
    """Whether saving continues if this process dies."""

    def claim(self) -> None:
        """Exclude other writers of the store. Raises Contention, AccessDenied, Unavailable."""

    def open(self, arena: Arena) -> None:
        """Open the store for writing: begin an epoch, and note it in the arena. Saving starts with `resume`.

        Raises Contention, Fenced, Corruption, AccessDenied, Unavailable.
        """

    def notify(self) -> None:
        """Look for requests in memory, because one was made."""

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all requests are durable. Return whether they are."""

    def fault(self) -> ScarError:
        """Return the reason why requests are still waiting."""

    @property
    def failure(self) -> ScarError | None:
        """The error that ended saving; None while it works."""

    @property
    def trouble(self) -> ScarError | None:
        """The error that has prevented saving for some time, while it is retried; None while saving works."""

    def stop(self) -> None:
        """Write nothing to the store until `resume`. Interrupts the current write: the request is served later."""

    def resume(self) -> None:
        """Start serving the requests in memory: after `open`, and again after `stop`."""

    def roll_back(self, seq: int) -> None:
        """Roll the store back to record `seq`, and drop all requests. Only while stopped.

        Begins an epoch, and notes it in the arena.
        """

    def brace(self, seconds: float) -> None:
        """Announce that the host shuts down in `seconds`: an evacuation may follow. Never raises."""

    def evacuate(self, seconds: float, to: str | None = None) -> Evacuated:
        """Save what the time allows to other hosts and to the store, and report what is safe.

        to: see `Session.evacuate`. Returns in time, even if the store hangs. Raises UsageError for an unknown host.
        """

    def await_peers(self, count: int, timeout: float) -> Acknowledged:
        """Wait up to `timeout` seconds until `count` other hosts have everything that is now in this host's memory."""

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        """Send the outcome of request `number` to the command that waits for it."""

    def close(self, current: Current = Current.FINISH) -> None:
        """Release the store. Requests that wait stay.

        current: treatment of the request that is being served. The daemon finishes it in any case.
        """

    def leave(self) -> None:
        """Leave without waiting, like a process that dies. The daemon serves what waits."""


class LocalSaver:
    """A `Saver` in a thread of this process."""

    outlives = False

    def __init__(self, store: Store) -> None:
        """Prepare, without a thread."""
        self.store = store
        self.arena: Arena | None = None
        """The arena, once open."""
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
        """See `Saver`. again: the training process that made the arena's copies is alive, and continues."""
        with contextlib.suppress(ScarError):  # for display only
            self._saved_at = last_saved(self.store)
        # Checked before an epoch begins, because a saver of a foreign arena must not fence the real one. Checked again
        # after it, when no other process can write.
        require_kinship(arena, self.store.line(), self.store, again=again)
        self.shard_of = self.store.shard_of(arena.layout)
        self._writer = writer = open_writer(self.store, layout=arena.layout)
        try:
            require_kinship(arena, writer.line, self.store, again=again)
        except BaseException:
            writer.close()
            raise
        if not again:
            reconcile(arena, writer.state, writer.epoch)
        arena.end_holds()
        arena.begin_epoch(writer.epoch, again=again)
        note_site(arena.folder, self.store)
        writer.accompany(arena)
        self.arena = arena
        self.stopped = True

    def notify(self) -> None:
        """Wake the thread. Without one, `resume` starts one that looks."""
        if self._thread is not None:
            self._thread.notify()

    def drain(self, timeout: float) -> bool:
        return self._running().drain(timeout)

    def fault(self) -> ScarError:
        return self._running().fault()

    @property
    def failure(self) -> ScarError | None:
        return self._thread.failure if self._thread is not None else None

    @property
    def trouble(self) -> ScarError | None:
        """See `Saver`. Always None, because the thread logs failures."""
        return None

    @property
    def thread(self) -> PersisterThread | None:
        """The saving thread, for its statistics; None before it was started."""
        return self._thread

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close(Current.INTERRUPT)
        self.stopped = True

    def resume(self) -> None:
        """Start the thread, unless it is running."""
        if self.stopped:
            self._start()

    def roll_back(self, seq: int) -> None:
        assert self.arena is not None
        assert self._writer is not None
        self._writer.roll_back(seq)
        self.arena.serve(self.arena.asked)
        self.arena.begin_epoch(self._writer.epoch)

    def brace(self, seconds: float) -> None:
        """See `Saver`. Does nothing: the saving thread ends with this process."""

    def evacuate(self, seconds: float, to: str | None = None) -> Evacuated:
        """See `Saver`. Without a daemon no other host is known. Raises Unavailable before saving has started."""
        from scarctl.persist.evacuation import STORE_ONLY, unknown_host

        if to not in (None, STORE_ONLY):
            raise unknown_host(str(to), ())
        return self.save_in_time(seconds, None)

    def save_in_time(self, seconds: float, copies: Copies | None) -> Evacuated:
        """Save to the store what the time allows: see `PersisterThread.evacuate`."""
        return self._running().evacuate(seconds, copies)

    def await_peers(self, count: int, timeout: float) -> Acknowledged:
        """See `Saver`. Only the daemon has peers."""
        return Acknowledged(0, ())

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        """See `Saver`. Does nothing: commands send requests through the daemon only."""

    def close(self, current: Current = Current.FINISH) -> None:
        if current is Current.INTERRUPT:
            self.store.blobs.hurry()
        try:
            if self._thread is not None:
                self._thread.close(current)
            if self._writer is not None:
                self._writer.close()
        finally:
            if current is Current.INTERRUPT:
                self.store.blobs.close()  # ends the effect of `hurry`

    def leave(self) -> None:
        """See `Saver`. No other process would continue."""
        self.close()

    def _start(self) -> None:
        assert self.arena is not None
        assert self._writer is not None
        self.stopped = False
        persister = Persister(self.arena, self._writer)
        if self._thread is not None:
            self._saved_at = self._thread.stats.saved_at
        self._thread = PersisterThread(persister)
        self._thread.stats.saved_at = self._thread.stats.saved_at or self._saved_at

    def _running(self) -> PersisterThread:
        if self._thread is None:
            raise Unavailable("saving has not started")
        return self._thread


def reconcile(arena: Arena, state: ShardState, epoch: int) -> None:
    """Bring the arena of a dead process into the epoch that begins now.

    state: the newest state in the store.

    The store may have newer copies of some partitions, if the arena is a replica: memory then has no copy of those. All
    others count as copies of `epoch`. Pending ones will be committed in it, and must not look newer in the store than
    in the arena.
    """
    arena.settle()
    slot = arena.slot
    stored = np.full(arena.layout.partitions, NEVER, dtype=np.int64)
    stored[state.ids] = state.version
    error = arena.encoding_error[state.ids]
    # Without a measured error the arena's copy will come from the store, so the two are equal.
    arena.encoding_error[state.ids] = np.where(state.encoded, np.maximum(error, 0.0), -1.0)
    if state.whole and state.whole == slot.whole:
        # The process died after it had committed the whole state, but before it noted the commit in the arena.
        arena.acknowledge(state.ids, slot.version[state.ids], slot.moments[state.ids])
        arena.seal(slot.head)  # its extras may be of an earlier checkpoint of this state
    newest = slot.newest()
    stale = np.flatnonzero((arena.lifted(stored) > arena.lifted(newest)) & slot.intact())
    if stale.size:
        slot.version[:] = newest
        slot.name("")
        slot.moments[stale], slot.version[stale] = 0, NEVER
    there = slot.version >= 0
    slot.version[there] = pack(epoch, 0) | step_of(slot.version[there])
    if slot.moment:
        slot.stamp(slot.moment, pack(epoch, step_of(slot.head)), slot.whole)
    known = np.flatnonzero((arena.saved == slot.moments) & slot.intact())
    arena.acknowledge(known, slot.version[known], slot.moments[known])
