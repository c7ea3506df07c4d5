"""A session's engine: there is none until its layout is known, and it goes only once it is known from which step.

It may be open before that: by a resume that failed and may be tried again.
"""

from __future__ import annotations

import contextlib
import logging

from scarctl.caveats import Caveats
from scarctl.config import SessionSettings
from scarctl.daemon.folder import arena_folder
from scarctl.daemon.saver import Saver
from scarctl.engine import Engine
from scarctl.errors import ScarError, UsageError
from scarctl.layout import Layout
from scarctl.store import Store
from scarctl.together import Together

log = logging.getLogger("scarctl")


class Opening:
    """Opens the engine of one session, and lets go of it."""

    def __init__(
        self,
        store: Store,
        settings: SessionSettings,
        saver: Saver,
        together: Together,
        caveats: Caveats,
    ) -> None:
        self._store = store
        self._settings = settings
        self._saver = saver
        self._together = together
        self._caveats = caveats
        self.opened: Engine | None = None
        self.engine: Engine | None = None
        """The same, once it goes."""
        self._looked = False
        """What the store has was read, or is not to be; it may be nothing that is whole."""
        self._superseding = False
        """What the store has is not to be gone on from."""

    def open(self, layout: Layout, *, stopped: bool = False) -> Engine:
        """Open the arena, and start saving (not while `stopped`), unless that is done already."""
        if self.opened is None:
            folder = arena_folder(self._settings.arena_dir, self._store.run_id)
            self._together.begin(self._store)
            self.opened = self._together.agree(
                lambda: Engine(
                    self._store,
                    layout,
                    self._settings,
                    folder,
                    self._saver,
                    stopped=stopped,
                    selector=self._together.selector(),
                    caveats=self._caveats,
                ),
                undo=lambda engine: engine.leave(),
            )
        return self.opened

    def start(self, layout: Layout, head_step: int) -> Engine:
        """An engine that goes on from the live state."""
        engine = self.open(layout, stopped=self._superseding)
        if self._superseding:
            engine.start_over()
            engine.saver.resume()
        return self.go(engine, head_step)

    def go(self, engine: Engine, head_step: int) -> Engine:
        """Let it go on from a step."""
        self.engine = engine
        engine.arena.head_step = head_step
        return engine

    def looked(self, *, superseding: bool = False) -> None:
        """What the store has is dealt with; superseding: by giving it up."""
        self._looked, self._superseding = True, superseding

    def require_looked(self) -> None:
        """Raises UsageError where a loop is about to begin that has not resumed from what the store has."""
        if not self._looked and self._together.holds_earlier_run(self._store):
            raise UsageError(
                f"{self._store.url} holds an earlier run, and this one did not resume it",
                hint="call session.resume() before the loop, or use a new store; nothing was changed",
            )

    def close(self, *, failed: bool) -> None:
        """Wait for the store and close the arena; after a failure leave both to the daemon, if there is one.

        Raises ScarError when the store cannot be closed.
        """
        engine = self.opened
        if engine is None:
            self._saver.close()
            log.info("closed %s: nothing was saved in this session", self._store.url)
            return
        sealed = False
        with contextlib.suppress(ScarError):  # for the log only; what follows meets the fault, and reports it
            sealed = engine.is_sealed()
        step = f"{engine.arena.head_step}, {'sealed' if sealed else 'not sealed'}"
        waiting, folder = int(engine.arena.pending().sum()), engine.arena.folder
        if engine is not self.engine:
            engine.leave()  # a resume that failed: all stays as it was
            log.info("closed %s: it was not resumed, and stays as it was", self._store.url)
        elif failed and self._saver.outlives:
            engine.leave()
            log.info(
                "closed %s after a failure: step %s; the daemon saves the %d partitions that wait in %s",
                self._store.url,
                step,
                waiting,
                folder,
            )
        elif engine.close(self._settings.drain_timeout):
            log.info("closed %s: step %s, all of it durable", self._store.url, step)
        else:
            log.info("closed %s: step %s, not all of it durable", self._store.url, step)
            log.error(
                "not everything is durable in %s: %s. It stays in %s; the next session on this host goes on with it",
                self._store.url,
                engine.saver.fault(),
                engine.arena.folder,
            )
