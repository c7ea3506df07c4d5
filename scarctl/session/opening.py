"""Open and close a session's engine, which needs the layout of the state.

The engine starts once the step is known from which the session continues. After a failed resume it stays open without
running, for another attempt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scarctl.adapter import Adapter
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, require_room
from scarctl.arena.kinship import arena_for
from scarctl.checkpoint.binding import Binding
from scarctl.checkpoint.engine import Engine
from scarctl.config import SessionSettings
from scarctl.errors import ScarError, UsageError
from scarctl.persist.saver import LocalSaver, Saver
from scarctl.session.gate import Gate
from scarctl.session.peers import Together
from scarctl.session.progress import Progress
from scarctl.session.requests import Requests
from scarctl.state.caveats import Caveats
from scarctl.state.journal import Journal
from scarctl.state.layout import Layout
from scarctl.store import Store
from scarctl.store.backends.address import IN_THIS_PROCESS, portable_options
from scarctl.store.backing import check_cut
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.daemon.request import Request

log = logging.getLogger("scarctl")

_SILENT = 3.0
"""Seconds that closing waits for the store before it says so."""
_WITHOUT = ("daemon-not-started", "daemon-full")
"""Kinds of errors after which a session saves without a daemon, unless it requires one."""


def claim(store: Store, settings: SessionSettings, binding: Binding, requests: Requests) -> Saver:
    """Return the session's saver, once no other process writes to the store.

    Raises as `Saver.claim` does. Raises Unavailable if there is no room for the arena, so that no step fails for it.
    """
    folder = arena_folder(settings.arena_dir, store.run_id)
    require_room(folder, 2 * binding.least_bytes())  # two slots
    return claim_saver(store, settings, requests.add)


def claim_saver(store: Store, settings: SessionSettings, on_request: Callable[[Request], None]) -> Saver:
    """Claim the store for a session, and return its saver.

    on_request: called in another thread when a command sends a request.

    Raises Contention, AccessDenied, Unavailable. If the settings require a daemon, raises the error of its start.
    """
    if settings.daemon is not False and store.address.scheme != IN_THIS_PROCESS:
        from scarctl.daemon.saver import DaemonSaver

        folder = arena_folder(settings.arena_dir, store.run_id).parent
        options = portable_options(store.address, settings.storage_options, os.environ)
        saver: Saver = DaemonSaver(store.address.url, store.run_id, folder, on_request, options, store.part)
        try:
            saver.claim()
            log.info("%s, saved by the daemon in %s", _attached(store, settings), folder)
            return saver
        except BaseException as error:
            saver.close()
            if settings.daemon or getattr(error, "kind", None) not in _WITHOUT:
                raise
            log.warning("%s. Saving runs in a thread of this process, and ends with it", error)
    saver = LocalSaver(store)
    saver.claim()
    log.info("%s, saved by a thread of this process", _attached(store, settings))
    return saver


def _attached(store: Store, settings: SessionSettings) -> str:
    return (
        f"attached to {store.url}: interval {settings.interval}, fraction {settings.fraction:.4g}, "
        f"{counted(store.settings.shards, 'shard')}"
    )


class Opening:
    """Opens the engine of one session, and closes it."""

    def __init__(
        self, store: Store, settings: SessionSettings, saver: Saver, together: Together, caveats: Caveats
    ) -> None:
        self.store = store
        self._settings = settings
        self._saver = saver
        self._together = together
        self._caveats = caveats
        self.opened: Engine | None = None
        self.engine: Engine | None = None
        """The engine, once it runs."""
        self._looked = False
        """Whether the session has resumed from the store, or supersedes its state."""
        self._superseding = False
        """Whether the session supersedes the state in the store."""

    def open(self, layout: Layout, *, resuming: bool = False) -> Engine:
        """Open the arena, unless it is open. Nothing is saved before `Engine.start`.

        resuming: saved copies fill a new arena, whose rows get no space before.
        """
        if self.opened is None:
            self._together.begin(self.store)
            arena = self._together.agree(
                lambda: self._arena(layout, resuming), undo=lambda arena: arena.close()
            )
            try:
                if resuming:
                    self._together.agree_in_memory(arena)
            except BaseException:
                arena.close()
                raise
            self.opened = self._together.agree(
                lambda: self._engine(layout, arena), undo=lambda engine: engine.leave()
            )
            self._together.keep_copies(self._saver, self._settings, self._caveats)
        return self.opened

    def _arena(self, layout: Layout, resuming: bool) -> Arena:
        settings = self._settings
        check_cut(self.store, layout, asked=settings.partition_bytes is not None or bool(settings.rows))
        return arena_for(
            arena_folder(settings.arena_dir, self.store.run_id), layout, self.store, sparse=resuming
        )

    def _engine(self, layout: Layout, arena: Arena) -> Engine:
        return Engine(
            self.store,
            layout,
            self._settings,
            arena,
            self._saver,
            selector=self._together.selector(),
            caveats=self._caveats,
        )

    def start(self, layout: Layout, head_step: int) -> Engine:
        """Save from now on, beginning with the live state."""
        engine = self.open(layout)
        if self._superseding:
            engine.start_over()
        self.begin_saving(engine)
        return self.run_on(engine, head_step)

    def begin_saving(self, engine: Engine) -> None:
        """Start the engine, on all ranks or on none."""
        self._together.agree(engine.start, undo=lambda _: engine.stop())

    def run_on(self, engine: Engine, head_step: int) -> Engine:
        """Make the engine the session's, at `head_step`, and return it."""
        self.engine = engine
        engine.arena.reach(head_step)
        return engine

    def looked(self, *, superseding: bool = False) -> None:
        """Note that the session has resumed. superseding: it replaces the state in the store instead."""
        self._looked, self._superseding = True, superseding

    def require_looked(self) -> None:
        """Raise UsageError if the store holds an earlier run and the session has not resumed it."""
        if not self._looked and self._together.holds_earlier_run(self.store):
            raise UsageError(
                f"{self.store.url} holds an earlier run, and this one did not resume it",
                hint="call session.resume() before the loop, or use a new store; nothing was changed",
            )

    def close(self, *, failed: bool) -> None:
        """Wait for the store and close the arena. After a failure, leave both to the daemon, if one runs.

        Raises ScarError if the store cannot be closed.
        """
        self._together.end_copies()
        engine = self.opened
        if engine is None:
            self._saver.close()
            log.info("closed %s: nothing was saved in this session", self.store.url)
            return
        sealed = False
        with contextlib.suppress(ScarError):  # only for the log: closing meets the same fault, and reports it
            sealed = engine.is_sealed()
        step = f"{engine.arena.head_step}, {'sealed' if sealed else 'not sealed'}"
        waiting, folder = int(engine.arena.pending().sum()), engine.arena.folder
        drained = False

        def drain() -> bool:
            nonlocal drained
            drained = self._drain(engine)
            return drained

        if engine is not self.engine:
            engine.leave()  # after a failed resume, arena and store stay unchanged
            log.info("closed %s: it was not resumed, and is unchanged", self.store.url)
        elif failed and self._saver.outlives:
            engine.leave()
            log.info(
                "closed %s after a failure: step %s; the daemon saves the %d pending partitions in %s",
                self.store.url,
                step,
                waiting,
                folder,
            )
        elif engine.close(drain):
            log.info("closed %s: step %s, all of it durable", self.store.url, step)
        elif drained:
            log.info(
                "closed %s: step %s. The store has what it was sent; newer copies of %d partitions stay in %s, and the "
                "next session on this host saves them",
                self.store.url,
                step,
                waiting,
                folder,
            )
        else:
            log.error(
                "closed %s: step %s, but not everything is durable: %s. The rest stays in %s; the next session on this "
                "host saves it",
                self.store.url,
                step,
                engine.saver.fault(),
                engine.arena.folder,
            )

    def _drain(self, engine: Engine) -> bool:
        """Wait up to `timeout` seconds for the store, and warn if that takes long. Return whether all is durable."""
        from scarctl.arena.durability import durability

        saver, timeout, began = engine.saver, self._settings.timeout, time.monotonic()
        silent = min(timeout, _SILENT)
        if saver.drain(silent):
            return True
        left, fault = timeout - (time.monotonic() - began), saver.fault()
        # Back before its time: waiting longer would not help.
        if left <= 0 or left > timeout - 0.9 * silent or not fault.retryable:
            return False
        kept = durability(engine.arena)
        lacking = f"{counted(kept.pending_partitions, 'partition')} ({human_bytes(kept.pending_bytes)})"
        log.warning(
            "closing %s waits up to %.0f s more for the store%s%s. All is safe in this host's memory, in %s: if this "
            "process ends now, %s",
            self.store.url,
            left,
            f", which lacks {lacking}" if kept.pending_partitions else "'s last record",
            "" if fault.kind == "store-late" else f": {fault}",
            engine.arena.folder,
            "the daemon, or the next session on this host, saves them"
            if saver.outlives
            else "the next session on this host saves them",
        )
        return saver.drain(left)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one session that saving, resuming and its steps share."""

    adapter: Adapter
    settings: SessionSettings
    together: Together
    gate: Gate
    progress: Progress
    binding: Binding
    opening: Opening
    journal: Journal
