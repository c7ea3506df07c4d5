"""Save one session's state between two steps: a checkpoint in two halves, or a sealed one at once.

The training thread has its time taken in three places. After the last optimizer's step it reads the extras that the
next batch will change, clones the buffers that the next forward will change, and starts the copy on a worker thread.
Before the next optimizer step it waits for the rest of the copy, reads the remaining extras, and queues the checkpoint.

A flush does the same at any time between two steps, also from another thread. `scarctl.session.gate` keeps flushes and
steps apart.
"""

from __future__ import annotations

import logging
from enum import Enum

from scarctl.checkpoint.checkpointer import Checkpoints, Stats
from scarctl.checkpoint.copied import Extent
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.step_end import Moment, Moments
from scarctl.checkpoint.streams import Streams
from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.session.parts import Parts
from scarctl.state.extras import Extras
from scarctl.util.worker import Worker

log = logging.getLogger("scarctl")

FLUSH_SECONDS = 10.0
"""How long a flush waits for a running step to end."""
_LAST_DRAIN = 10.0
"""Seconds that a process which a signal ends waits for the store, at most: it could be killed any time."""
_PATIENCE = 120.0
"""Seconds that closing waits for a flush or a step in another thread."""


class Ending(Enum):
    """Why a session ends."""

    CLOSED = "closed"
    """The loop has closed it, between two iterations: the state is saved as it is."""
    EXIT = "exit"
    """The process ends: the state of the newest step's end is saved."""
    FAILED = "failed"
    """An exception is on its way: the same, unless a step may be half done, and nothing waits for the store."""


class Saving:
    """Takes the ends of steps, and saves the state as it was then. To be called with the gate held."""

    def __init__(self, parts: Parts) -> None:
        self.stats = Stats()
        self.moment: Moment | None = None
        """The end of the newest step, if it is taken after every step."""
        self.flushed: int | None = None
        """The newest step that a flush has sealed."""
        self.doomed = False
        """A signal ends this process any moment: what was flushed has to stay as it is."""
        self.streams = Streams()
        self.worker = Worker("scarctl-copy")
        self._settings = parts.settings
        self._opening = parts.opening
        self._binding = parts.binding
        self._progress = parts.progress
        self._gate = parts.gate
        self._together = parts.together
        self._moments = Moments(parts.adapter, self.streams, parts.together)
        self._checkpoints = Checkpoints(
            self.worker,
            self.streams,
            self.stats,
            self.fault,
            self.extras,
            validate=parts.settings.validate,
        )

    @property
    def under_way(self) -> bool:
        """Whether the first half of a checkpoint waits for its second."""
        return self._checkpoints.under_way

    @property
    def unfinished(self) -> bool:
        """Whether `finish` has something to do."""
        engine = self._opening.engine
        return engine is not None and (self._checkpoints.under_way or engine.selector.expecting)

    def take(self, *, early: bool = True) -> Moment | None:
        """Take the end of the newest step, as it is now. Return None when that fails.

        early: read the extras that the next batch changes, too.
        """
        try:
            moment = self._moments.take(self._progress.head_step, early=early)
        except Exception as error:
            self.fault(error)
            return None
        if self._settings.flush_on_signal:
            self.moment = moment
        return moment

    def take_between(self) -> Moment | None:
        """Return the moment that a checkpoint of now is of, between two iterations of the loop."""
        return self._progress.settled_moment() or self.take()

    def begin(self, moment: Moment | None, extent: Extent) -> None:
        """Start the first half: the copy of the state as it was at `moment`. Do nothing for None."""
        engine = self._opening.engine
        if moment is None or engine is None or self.doomed:
            return
        try:
            self._checkpoints.begin(engine, self._binding.live(engine.arena), moment, extent)
        except Exception as error:
            self.fault(error)

    def finish(self) -> bool:
        """Do the second half, if one is under way. Return whether it has sealed the state."""
        engine = self._opening.engine
        if engine is None:
            return False
        engine.selector.hurry()
        copied = self._checkpoints.finish(engine)
        engine.selector.settle()
        return copied is not None and copied.sealed

    def seal(self, moment: Moment | None) -> bool:
        """Save the whole state of `moment`, both halves at once. Return whether it is sealed in this host's memory."""
        self.finish()
        self.begin(moment, Extent.WHOLE)
        sealed = self.finish()
        if sealed and moment is not None:
            self.flushed = moment.step
        return sealed

    def now(self, extent: Extent) -> bool:
        """Save the state as it is, both halves at once. Return whether nothing went wrong."""
        self.finish()
        errors = self.stats.errors
        self.begin(self.take_between(), extent)
        self.finish()
        return self.stats.errors == errors

    def require_durable(self, engine: Engine, *, saved: bool) -> None:
        """Wait for the store. Raises Unavailable when the checkpoint was not `saved`, and the store's fault."""
        if not saved:
            raise Unavailable(
                f"the checkpoint of step {self._progress.head_step} failed: {self.stats.last_error}",
                hint="what was saved before is safe",
                kind="not-saved",
            )
        if not engine.saver.drain(self._settings.timeout):
            raise engine.saver.fault()

    def flush(self) -> bool:
        """Seal the state of the newest step's end. Return whether that worked."""
        return self.seal(self.moment or self.take())

    def look_ahead(self) -> None:
        """After a step: have the worker find distances for the checkpoints to come."""
        if self._opening.engine is not None:
            self._checkpoints.look(self._opening.engine)

    def extras(self, engine: Engine, moment: Moment) -> Extras:
        """Return the extras of the step of `moment`. To be called right before the next step."""
        settled = self._progress.extras(moment)  # first: it may find caveats
        return engine.extras(settled, self._progress.caveats)

    def jumped(self) -> None:
        """Forget what was taken, flushed or named: the state was recovered, and is another one now."""
        self.flushed = self.moment = None
        self._moments.identities.turn()

    def fault(self, error: Exception) -> None:
        """Count and log what went wrong while saving. Raise it only if the user wants that (`on_error="raise"`)."""
        self.stats.errors += 1
        if self._opening.opened is not None:
            self._opening.opened.arena.note_errors(self.stats.errors)
        if str(error) != self.stats.last_error:
            log.error("checkpoint at step %d failed: %s", self._progress.head_step, error)
        self.stats.last_error = str(error)
        if self._settings.on_error == "raise":
            raise error

    # -- the last time ------------------------------------------------------------------------------------------

    def before_signal(self, *, fatal: bool) -> None:
        """Flush before SIGTERM or SIGINT takes its effect, inside `quiet`. fatal: it ends this process right after."""
        engine = self._opening.engine
        assert engine is not None, "nothing is flushed before the first step"
        if not self._ready(engine):
            log.warning("a signal came, and the last copy does not end: the state is not flushed")
        elif self.moment is not None and self.seal(self.moment):
            log.info("a signal came: step %d is kept in this host's memory", self._progress.head_step)
            if fatal:
                self._rescue(engine, self.moment)

    def end_now(self) -> None:
        """Give the store a last moment: a signal ends this process."""
        engine = self._opening.engine
        self.doomed = True
        if engine is not None and not engine.saver.outlives:
            engine.saver.drain(min(self._settings.timeout, _LAST_DRAIN))

    def last(self, ending: Ending, *, seal: bool) -> None:
        """Finish what is under way and, with `seal`, save the whole state, for the session ends."""
        failed = ending is Ending.FAILED
        with self._gate.quiet(_PATIENCE, between=not failed) as quiet:
            self.finish()
            head = self._progress.head_step
            # A step that raised has left parameters half changed: what was saved before is better.
            if not (seal and quiet and head > 0):
                return
            if ending is not Ending.CLOSED and self.flushed == head:
                return
            moment = self.take_between() if ending is Ending.CLOSED else self.moment or self.take()
            errors = self.stats.errors
            if not self.seal(moment) and self.stats.errors > errors:
                # Another package's signal handler may have raised in the middle of it.
                self.seal(moment)
            engine = self._opening.engine
            if failed and engine is not None and moment is not None:
                self._rescue(engine, moment)

    def let_go(self, ending: Ending) -> None:
        """Close the engine; after a failure leave what waits for the store to the daemon."""
        try:
            self._opening.close(failed=ending is Ending.FAILED)
        except ScarError as error:
            self.fault(error)

    def rest(self) -> None:
        """Wait for the look ahead that is under way, and let go of arena and state. For good."""
        self._checkpoints.rest(self._opening.engine)

    def _ready(self, engine: Engine) -> bool:
        """Wait a while for the copy under way. Return whether there is none any more."""
        engine.selector.hurry()
        return self._checkpoints.ready(FLUSH_SECONDS)

    def _rescue(self, engine: Engine, moment: Moment) -> None:
        """Help other ranks: the state of `moment` is saved, and this process ends because something failed."""
        whole = engine.arena.whole if self.flushed == moment.step else ""
        store = self._opening.store
        self._together.rescue(store, moment.step, lambda: self.extras(engine, moment), whole)

    def require_started(self) -> Engine:
        """Return the engine. Raises UsageError before the first step."""
        engine = self._opening.engine
        if engine is None:
            raise UsageError(
                "nothing is saved before the first step: the optimizer has no state yet",
                hint="take a step, or resume(), first",
            )
        return engine
