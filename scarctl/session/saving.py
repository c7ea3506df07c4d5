"""Save one session's state between two steps: a checkpoint in two halves, or a sealed one at once.

The first half runs in the training thread, after the last optimizer's step. It reads the extras that the next batch
will change, and clones the buffers that the next forward will change. Then a worker thread starts the copy. The second
half runs before the next optimizer step. It waits for the copy, reads the remaining extras, and queues the checkpoint.

A flush does the same at any time between two steps, also from another thread. `scarctl.session.gate` keeps flushes and
steps apart.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Literal

import numpy as np

from scarctl.arena.durability import durability
from scarctl.checkpoint.checkpointer import Checkpoints, Stats
from scarctl.checkpoint.copied import Copied
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.step_end import Moment, Moments
from scarctl.checkpoint.streams import Streams
from scarctl.errors import LayoutMismatch, ScarError, Unavailable, UsageError
from scarctl.policy.turns import Turn
from scarctl.session.beginning import Beginning
from scarctl.session.parts import Parts
from scarctl.session.rest import Rest
from scarctl.state.extras import Extras, Notes
from scarctl.state.journal import Sample
from scarctl.state.version import step_of
from scarctl.util.worker import Worker

log = logging.getLogger("scarctl")

FLUSH_SECONDS = 10.0
"""Longest wait of a flush for a running step to end, in seconds."""
UNSAVED = "values are not finite, or were written while they were copied"
TORN = "the newest iteration has raised an exception, and its changes may be incomplete"


class Saving:
    """Keeps the moments of steps' ends, and saves the state of these moments. Call it with the gate held."""

    def __init__(self, parts: Parts) -> None:
        self.stats = Stats()
        self.moment: Moment | None = None
        """The moment at the end of the newest step, if it was kept: for a checkpoint, or as every step's end is."""
        self.flushed: int | None = None
        """The newest step that a flush has sealed."""
        self._copied: Copied | None = None
        """The newest checkpoint."""
        self.doomed = False
        """A fatal signal has arrived: the flushed state must not be overwritten."""
        self.streams = Streams()
        self.worker = Worker("scarctl-copy")
        self._settings = parts.settings
        self._opening = parts.opening
        self._binding = parts.binding
        self._progress = parts.progress
        self._automatic = parts.adapter.automatic
        self._journal = parts.journal
        self._gate = parts.gate
        self._together = parts.together
        self._rest = Rest(parts)
        self._moments = Moments(parts.adapter, self.streams, parts.together)
        self._checkpoints = Checkpoints(
            self.worker,
            self.streams,
            self.stats,
            self.fault,
            self.extras,
            parts.together,
            validate=parts.settings.validate,
        )
        beginning = Beginning(parts, self.finish)
        parts.progress.end_copy, parts.progress.renew = self.end_copy, self._moments.renew
        parts.progress.keep, parts.progress.put_back = beginning.keep, beginning.put_back

    @property
    def under_way(self) -> bool:
        """Whether the first half of a checkpoint waits for its second."""
        return self._checkpoints.under_way

    @property
    def unfinished(self) -> bool:
        """Whether `finish` has something to do."""
        engine = self._opening.engine
        return engine is not None and (self._checkpoints.unfinished or engine.selector.expecting)

    def take(self, *, early: bool = True) -> Moment | None:
        """Keep the current moment as the newest step's end, and return it; None on failure.

        early: also read the extras that the next batch changes.
        """
        engine = self._opening.engine
        try:
            # A loop without hooks may replace its arrays in every iteration.
            if engine and self._gate.blocks and not (self._automatic and self._moments.weights.followed):
                self._moments.weights.follow(self._binding.live(engine.arena))
            moment = self._moments.take(self._progress.head_step, early=early)
        except Exception as error:
            self.fault(error)
            return None
        self.moment = moment
        return moment

    def is_saved(self, engine: Engine) -> bool:
        """Return whether the newest step is sealed with the extras of its end, which was not kept: after a resume."""
        try:
            return self.moment is None and engine.is_sealed() and self._rest.unchanged()
        except ScarError as error:  # saving meets the same error, and reports it
            log.debug("the copies cannot be read: %s", error)
            return False

    def newest_end(self, *, between: bool = False) -> Moment | None:
        """Return the moment of the newest step's end; the current one, with a caveat, if that was not kept.

        between: the caller knows that the loop is between two iterations.
        """
        if self.moment is not None:
            return self.moment
        moment = self.take()
        if moment is not None and not (between and self._progress.between):
            self._progress.late(moment)
        return moment

    def resumed(self, engine: Engine) -> None:
        """Fill the arena next to the loop's first pass, and keep the current moment if every step's end is kept."""
        self._checkpoints.fill(engine)
        if self._settings.flush_on_signal:
            # An exception in the next step then saves these extras, and no later ones.
            self.follow(engine)

    def follow(self, engine: Engine) -> None:
        """Keep the current moment, and notice from now on that weights are replaced."""
        if self._automatic:
            # The layout has slots that an optimizer makes later, at the first step of their parameters.
            with contextlib.suppress(LayoutMismatch):
                self._moments.weights.follow(self._binding.live(engine.arena))
        self.take()

    def take_between(self) -> Moment | None:
        """Return the moment for a checkpoint between two iterations of the loop.

        That is the newest step's end if the next forward has begun: it drew random numbers, and changed buffers. A pass
        without gradients after the step, such as one that measures statistics anew, is part of the live state.
        """
        kept, progress = self.moment, self._progress
        settled = progress.settled_moment()
        if settled is not None:
            if progress.loop.in_use:
                progress.flushed(settled)
            elif self._moments.renew(settled, closely=True) | settled.weights.replaced():
                progress.afterwards(settled)
            return settled
        begun = progress.witness.trains(progress.head_step)
        if begun and kept is not None and kept.step == progress.head_step and not kept.weights.replaced():
            # If the weights have changed since, that pass may have measured statistics for them, as the live ones are.
            measured = bool(kept.buffers) and kept.weights.moved()
            if not measured:
                self._moments.report(kept)
                return kept
        moment = self.take()
        if not begun:
            progress.witness.restart(progress.head_step)
        elif moment is not None and (moment.buffers or kept is None):
            progress.within(moment)
        if moment is not None and progress.loop.in_use and not progress.loop.usual:
            moment.settled = False
        return moment

    def begin(self, moment: Moment | None, turn: Turn, *, thorough: bool = True) -> None:
        """Start the first half: copy the state of `moment`. Do nothing for None. See `Checkpoints.begin`."""
        engine = self._opening.engine
        if moment is None or engine is None or self.doomed:
            return
        try:
            live = self._binding.live(engine.arena)
            self._moments.weights.follow(live)
            if torn := self._gate.torn:
                self._progress.torn(moment)
            self._checkpoints.begin(engine, live, moment, turn, torn=torn, thorough=thorough)
        except Exception as error:
            self.fault(error)

    def finish(self, *, hook: bool = False) -> bool:
        """Do the second half of the current checkpoint, if any. Return whether it has sealed the state.

        hook: see `Checkpoints.finish`.
        """
        engine = self._opening.engine
        if engine is None:
            return False
        engine.selector.hurry()
        copied = self._checkpoints.finish(engine, hook=hook)
        engine.selector.settle()
        self._copied = copied
        return copied is not None and copied.sealed

    def end_copy(self) -> None:
        """End the current copy, before the loop changes weights after the step."""
        engine = self._opening.engine
        if engine is not None and self._checkpoints.under_way:
            with self._gate.held():
                started = time.perf_counter()
                try:
                    engine.selector.hurry()
                    self._checkpoints.end_copy(engine)
                finally:
                    self.stats.stalled(started, part=True)

    def seal(self, moment: Moment | None) -> bool:
        """Save the whole state of `moment`, both halves at once. Return whether it is sealed in this host's memory."""
        self.finish()
        self.begin(moment, Turn.WHOLE)
        sealed = self.finish()
        if sealed and moment is not None:
            self.flushed = moment.step
        return sealed

    def now(self, turn: Turn) -> str:
        """Save the live state now, both halves at once. Return why that failed, or did not seal the whole; or ""."""
        self.finish()
        errors, kept = self.stats.errors, self.moment
        if kept is not None and not kept.weights.moves():
            self._look_outside(kept)
        self.begin(self.take_between(), turn)
        sealed = self.finish() or turn is not Turn.WHOLE
        why = "" if sealed else TORN if self._gate.torn else self.unsealed
        return self.stats.last_error if self.stats.errors > errors else why

    @property
    def unsealed(self) -> str:
        """Why a state that was saved without a fault is not sealed."""
        engine = self._opening.engine
        return (engine.marked.told if engine is not None else "") or UNSAVED

    def require(self, engine: Engine, what: bool | Literal["peers"], why: str) -> None:
        """Wait for the store, or with "peers" for other hosts: see `Session.checkpoint`. why: the result of `now`.

        Raises Unavailable (kind "not-saved", "peers-late"), ScarError ("not-sealed"), the store's fault.
        """
        if why:
            step, hint = self._progress.head_step, "earlier checkpoints are safe"
            if why in (UNSAVED, engine.marked.told):
                raise ScarError(f"step {step} could not be sealed: {why}", hint=hint, kind="not-sealed")
            raise Unavailable(f"the checkpoint of step {step} failed: {why}", hint=hint, kind="not-saved")
        if what == "peers":
            self._require_peers(engine)
        elif not engine.saver.drain(self._settings.timeout):
            raise engine.saver.fault()

    def _require_peers(self, engine: Engine) -> None:
        count = self._settings.peers if self._settings.peer_ack == "all" else 1
        found = engine.saver.await_peers(count, self._settings.timeout)
        if found.have < count:
            links = "; ".join(found.links) or "there is no link to another host"
            durable = durability(engine.arena).durable_step
            raise Unavailable(
                f"{found.have} of {count} hosts have acknowledged step {self._progress.head_step} within "
                f"{self._settings.timeout:g} s ({links}). It is safe in this host's memory, and not against the "
                f"loss of this host; the store has {f'step {durable}' if durable >= 0 else 'nothing yet'}",
                hint="training can continue: the copies are sent again; `scarctl daemon status` shows the links",
                kind="peers-late",
            )

    def rested(self, patience: float) -> int | None:
        """Return the newest step if the state equals its copies in memory, which are sealed, or those of a resume.

        None if they differ, or if it is reported when a step begins. patience: see `flush`. Call it without the gate.
        """
        if not self._gate.implied or not self._checkpoints.filled(patience):
            return None
        with self._gate.held():
            at_rest = not self._checkpoints.under_way and self._rest.unchanged()
            return self._progress.head_step if at_rest else None

    def flush(self, patience: float) -> bool:
        """Seal the state of the newest step's end. Return whether that succeeded.

        patience: seconds to wait while a resume still fills the arena. Until then the store has what it restored.
        """
        if not self._checkpoints.filled(patience):
            return False
        with self.streams.joined():
            mine = self._gate.blocks or self._gate.trainer == threading.get_ident()
            return self.seal_end(self.newest_end(between=mine))

    def ready(self, patience: float) -> bool:
        """Wait up to `patience` seconds for the current copy. Return whether it is done."""
        return self._checkpoints.ready(patience)

    def seal_end(self, moment: Moment | None) -> bool:
        """Seal the state of `moment`, a step's end. The loop may be in the middle of an evaluation."""
        if moment is not None:
            self._look_outside(moment)
        return self.seal(moment)

    def _look_outside(self, moment: Moment) -> None:
        """Look whether the state, which is about to be saved, is still that of the step of `moment`."""
        self._progress.flushed(moment, changed=self._rest.changed_outside(moment.weights))

    def spent(self) -> None:
        """Count what the checkpoint that a hook has just finished has cost."""
        engine, copied, self._copied = self._opening.engine, self._copied, None
        if engine is not None and copied is not None:
            engine.cadence.spent(self.stats.last_stall_seconds, copied.seconds)

    def extras(self, engine: Engine, moment: Moment) -> Extras:
        """Return the extras of the step of `moment`. Call it right before the next step."""
        settled = self._progress.extras(moment)  # comes first, because it may find caveats
        self._note_ages(engine, moment.step)
        caveats, events = tuple(self._progress.caveats), tuple(self._journal)
        return engine.extras(settled, Notes(caveats=caveats, events=events, samples=self._journal.samples))

    def _note_ages(self, engine: Engine, step: int) -> None:
        """Keep in the journal how old the copies are. Partitions of which the store has the copy have no age there."""
        now = time.time()
        if not self._journal.due(now):
            return
        arena = engine.arena
        copied = step_of(arena.newest()).min(initial=step)
        # A seal has found all durable copies unchanged.
        stored = np.maximum(arena.durable, arena.sealed)
        durable = step_of(stored[arena.pending()]).min(initial=step)
        self._journal.sample(Sample(now, step, int(copied), int(durable), self.stats.stall_seconds))

    def jumped(self) -> None:
        """Forget kept moments, flushes and names, because a recovery has changed the state."""
        self.stats.recoveries += 1
        self.flushed = self.moment = None
        self._moments.identities.turn()

    def fault(self, error: Exception) -> None:
        """Count and log a failure to save. Raise it only with `on_error="raise"`."""
        self.stats.errors += 1
        if self._opening.opened is not None:
            self._opening.opened.arena.note_errors(self.stats.errors)
        if str(error) != self.stats.last_error:
            log.error("checkpoint at step %d failed: %s", self._progress.head_step, error)
        self.stats.last_error = str(error)
        if self._settings.on_error == "raise":
            raise error

    def require_started(self) -> Engine:
        """Return the engine. Raises UsageError before the first step."""
        engine = self._opening.engine
        if engine is None:
            raise UsageError(
                "nothing is saved before the first step: the optimizer has no state yet",
                hint="first take a step, or call resume()",
            )
        return engine
