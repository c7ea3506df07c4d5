"""Save one session's state between two steps: a checkpoint in two halves, or a sealed one at once.

The first half runs in the training thread, when the loop declares that a step has ended. It reads the extras, and
clones the buffers that the next forward will change. Then a worker thread starts the copy. The second half makes the
copy current. It runs right after the copy in the same thread, or else before the next optimizer step, which waits for
it. If the loop does not declare its steps' ends, the first half runs right after the optimizer's step. The second one
then reads the extras, before the next step.

A flush does the same at any time between two steps, also from another thread. `scarctl.session.gate` keeps flushes and
steps apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

from scarctl.checkpoint.checkpointer import Checkpoints, Stats
from scarctl.checkpoint.copied import Copied
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.step_end import Moment, Moments
from scarctl.checkpoint.streams import Streams
from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.policy.turns import Turn
from scarctl.session.opening import Parts
from scarctl.state.extras import Extras, Notes
from scarctl.state.journal import Sample
from scarctl.state.torch_dtypes import plain
from scarctl.state.version import step_of
from scarctl.util.worker import Worker

log = logging.getLogger("scarctl")

FLUSH_SECONDS = 10.0
"""Longest wait of a flush for a running step to end, in seconds."""
UNSAVED = "values are not finite, or were written while they were copied"
HELD = "an earlier state is still being read for the store, and a later step is saved instead"
_POLL = 0.005
_SOON = 0.1
"""Seconds for which the second half of a checkpoint waits for the training thread to leave a hook."""
TORN = "the newest iteration has raised an exception, and its changes may be incomplete"


class Saving:
    """Keeps the moments of steps' ends, and saves the state of these moments. Call it with the gate held."""

    def __init__(self, parts: Parts) -> None:
        self.stats = Stats()
        self.moment: Moment | None = None
        """The moment at the end of the newest step, if it was kept: for a checkpoint, or as every step's end is."""
        self.flushed: int | None = None
        """The newest step that a flush has sealed."""
        self.resumed_at: int | None = None
        """The step from which the session has resumed."""
        self._copied: Copied | None = None
        """The newest checkpoint."""
        self._here = 0.0
        """Processor seconds of the newest checkpoint, if the training thread made all of it."""
        self.left_out = False
        """A checkpoint was left out, because a saver held the slot, since this was last set to False."""
        self.repeat: Callable[[Turn], None] = lambda _: None
        """Called with what was requested by a call, and left out."""
        self.over = False
        """Nothing is saved any more."""
        self.doomed = False
        """A fatal signal has arrived: the flushed state must not be overwritten."""
        self.streams = Streams()
        self.worker = Worker("scarctl-copy")
        self._settings = parts.settings
        self._opening = parts.opening
        self._binding = parts.binding
        self._progress = parts.progress
        self._adapter = parts.adapter
        self._journal = parts.journal
        self._several = parts.together.several
        self._gate = parts.gate
        self._held = parts.gate.held()
        self._together = parts.together
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

    @property
    def under_way(self) -> bool:
        """Whether the first half of a checkpoint waits for its second."""
        return self._checkpoints.under_way

    @property
    def unfinished(self) -> bool:
        """Whether `finish` has something to do."""
        engine = self._opening.engine
        return engine is not None and (
            self._checkpoints.busy or (self._several and engine.selector.expecting)
        )

    def take(self) -> Moment | None:
        """Keep the current moment as the newest step's end, and return it; None on failure."""
        self.moment = moment = self._now(self._progress.owned or self._progress.loop.used)
        return moment

    def _now(self, read: bool) -> Moment | None:
        """Return the current moment; None on failure. read: with the extras."""
        progress = self._progress
        loop = progress.loop
        try:
            moment = self._moments.take(progress.head_step, read=read)
            if loop.used:
                moment.position = (
                    loop.newest if loop.head == progress.head_step and loop.newest else loop.position()
                )
            moment.declared = progress.owned or (loop.used and loop.head == progress.head_step)
        except Exception as error:
            self.fault(error)
            return None
        return moment

    def newest_end(self) -> Moment | None:
        """Return the moment of the newest step's end: the current one if that was not kept."""
        if self.moment is not None:
            return self.moment
        moment = self._now(True)
        if moment is not None and not self._gate.blocks:
            moment.declared = False  # the loop may have begun the next iteration
        return moment

    def resumed(self, engine: Engine) -> None:
        """Fill the arena next to the loop's first pass."""
        self.resumed_at = self._progress.head_step
        self._checkpoints.fill(engine)

    def take_between(self) -> Moment | None:
        """Return the moment for a checkpoint that the loop asks for between two iterations.

        That is the newest declared moment if the loop has begun the next iteration.
        """
        if (
            self.moment is not None
            and self._progress.loop.in_use
            and self.moment.step == self._progress.head_step
        ):
            return self.moment
        return self._now(True)

    def begin(self, moment: Moment | None, turn: Turn, *, thorough: bool = True, flush: bool = False) -> None:
        """Start the first half: copy the state of `moment`. Do nothing for None. See `Checkpoints.begin`."""
        engine = self._opening.engine
        if moment is None or engine is None or self.doomed:
            return
        try:
            engine.arena.reach(self._progress.head_step)
            live = self._binding.live(engine.arena)
            # A framework may do more after its step, such as an evaluation, which a resume would leave out. An error of
            # the second half, and what several ranks agree on, are for the training thread.
            soon = not (
                thorough
                or not self._progress.loop.used
                or moment.state is None
                or moment.marks
                or self._several
                or self._settings.on_error == "raise"
            )
            here = soon and not engine.arena.is_filling and engine.cadence.here()
            self._copied, began = None, time.thread_time()
            self._checkpoints.begin(
                engine,
                live,
                moment,
                turn,
                torn=self._gate.torn,
                thorough=thorough,
                flush=flush,
                here=here,
            )
            if here:
                self.finish()
                self._here = time.thread_time() - began
            elif soon:
                self.worker.submit(partial(self._finish_soon, moment))
        except Exception as error:
            self.fault(error)

    def _finish_soon(self, moment: Moment) -> None:
        """Do the second half of the checkpoint of `moment` in the copying thread, if the training thread lets it."""
        with self._held.soon(_SOON) as free:
            if free and not self.over and self._checkpoints.moment is moment:
                began = time.thread_time()
                self.finish()
                self.spent(time.thread_time() - began)

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
        if copied is not None and copied.slot is None:
            self.left_out, copied = True, None  # it has cost nothing that says what one costs
        self._copied = copied
        return copied is not None and copied.sealed

    def seal(self, moment: Moment | None, patience: float | None = None) -> bool:
        """Save the whole state of `moment`, both halves at once. Return whether it is sealed in this host's memory.

        patience: seconds to wait while a reader holds the slot. None ends any hold, because this process, or its host,
            is about to end.
        """
        self.finish()
        self._await_slot(patience or 0.0)
        self.begin(moment, Turn.WHOLE, flush=patience is None)
        sealed, engine = self.finish(), self._opening.engine
        if sealed and moment is not None:
            self.flushed = moment.step
            if patience is None and engine is not None:
                engine.arena.note_last(engine.arena.slot.moment)
        return sealed

    def now(self, turn: Turn, patience: float) -> str:
        """Save the live state now, both halves at once. Return why that failed, or did not seal the whole; or "".

        patience: seconds to wait while a reader holds the slot. After them it is left out (`HELD`), and made later.
        """
        self.finish()
        errors, before = self.stats.errors, self.left_out
        self._await_slot(patience)
        self.left_out = False
        self.begin(self.take_between(), turn)
        sealed = self.finish()
        why = "" if sealed else TORN if self._gate.torn else self.unsealed
        if self.left_out:
            why = HELD
            self.repeat(turn)
        self.left_out |= before
        return self.stats.last_error if self.stats.errors > errors else why

    def _await_slot(self, patience: float) -> None:
        """Wait up to `patience` seconds until no reader holds the slot that the next checkpoint writes."""
        engine, deadline = self._opening.engine, time.monotonic() + patience
        while engine is not None and time.monotonic() < deadline and not engine.arena.writable:
            time.sleep(_POLL)

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
        from scarctl.arena.durability import durability

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

    def flush(self, patience: float, *, leaving: bool = False) -> bool:
        """Seal the state of the newest step's end. Return whether that succeeded.

        patience: seconds to wait while a resume still fills the arena, and while a reader holds the slot. Until then
            the store has what it restored. leaving: the host shuts down, which ends any hold.
        """
        if not self.filled(patience):
            return False
        with self.streams.joined():
            return self.seal(self.newest_end(), None if leaving else patience)

    def filled(self, patience: float) -> bool:
        """Wait up to `patience` seconds while a resume fills the arena. Return whether that has ended."""
        return self._checkpoints.filled(patience)

    def ready(self, patience: float) -> bool:
        """Wait up to `patience` seconds for the current copy. Return whether it is done."""
        return self._checkpoints.ready(patience)

    def spent(self, seconds: float = 0.0) -> None:
        """Count what the regular checkpoint that has just been finished has cost.

        seconds: processor time of its second half, if that ran in the copying thread.
        """
        engine, copied, self._copied = self._opening.engine, self._copied, None
        if engine is not None and copied is not None:
            self.stats.copy_seconds += seconds
            if copied.aside:
                engine.cadence.spent(self.stats.last_stall_seconds, copied.seconds + seconds)
            else:  # not the time for which other processes had the processor
                engine.cadence.spent(self._here, copied.seconds, aside=False)

    def extras(self, engine: Engine, moment: Moment) -> Extras:
        """Return the extras of the step of `moment`. Call it before the next step changes anything."""
        state = moment.read(self._adapter)
        position: Any = None if moment.position is None else plain(moment.position)
        self._note_ages(engine, moment.step)
        caveats, events = self._progress.caveats_at(moment.step), tuple(self._journal)
        notes = Notes(caveats=caveats, events=events, samples=self._journal.samples, declared=moment.declared)
        return engine.extras(Extras(state, loop=position), notes)

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
