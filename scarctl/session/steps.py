"""Do a session's work before an iteration changes parameters, and after it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from scarctl.adapter import Watching
from scarctl.checkpoint.step_end import check_step
from scarctl.daemon.request import Request
from scarctl.errors import LayoutMismatch, ScarError, UsageError
from scarctl.policy.turns import Turn
from scarctl.session.parts import Parts
from scarctl.session.progress import PASSING
from scarctl.session.requests import Requests
from scarctl.session.saving import Saving
from scarctl.util.collection import without_collection

_DIFFER = (
    "ranks have different values of parameters that they should have in common, as under DistributedDataParallel: one "
    "rank's are saved, and all ranks resume with them. Name only equal ones in scarctl.Ranks(replicated=...)"
)


class Owner(Protocol):
    """The methods of a session that its steps call."""

    def _check_open(self) -> None:
        """Raise UsageError if the session is closed, or another process's."""

    def _inert(self) -> bool:
        """Return whether steps do nothing."""

    def _grant(self, request: Request) -> None:
        """Carry out a command's recovery, and answer it."""


class Steps:
    """The beginnings and ends of one session's iterations."""

    def __init__(
        self,
        owner: Owner,
        parts: Parts,
        requests: Requests,
        saving: Saving,
        watch: Watching,
        touched: Callable[[], Mapping[str, torch.Tensor]] | None,
    ) -> None:
        """Take the session's parts. touched: returns the rows that the coming step will change; None: not needed."""
        self.touched = touched
        self._owner = owner
        self._opening = parts.opening
        self._binding = parts.binding
        self._progress = parts.progress
        self._gate = parts.gate
        self._held = parts.gate.held()
        self._journal = parts.journal
        self._requests = requests
        self._saving = saving
        self._watch = watch
        self._flush_on_signal = parts.settings.flush_on_signal
        self._savable = False
        """Whether the state was found to be savable."""
        self._regular = False
        """A regular checkpoint is due after the newest step."""
        self._differ = False
        """Ranks were found to differ, and not yet to agree again."""

    def counted(self, step: int | None, *, hooked: bool) -> None:
        """See `Session.step`. hooked: hooks report the beginnings of iterations."""
        if self._gate.blocks:
            raise UsageError(
                "session.iteration() counts each of its blocks, so session.step() would count one twice",
                hint="omit session.step()",
            )
        if step is not None:
            check_step(step, self._progress.head_step)
            self._progress.head_step = step - 1
        if hooked:
            self.after()
            return
        self._between()
        self.after()
        self._finish()
        self._gate.enter()

    @contextmanager
    def block(self) -> Iterator[None]:
        """See `Session.iteration`."""
        with self._gate.block():
            self._owner._check_open()
            self._between()
            self._gate.enter()
            yield
            # What a client is answered from here on must be saved.
            self._gate.thaw()
            self._owner._check_open()
            self.after()
            self._finish()

    def before(self) -> None:
        """Finish the current copy, right before an optimizer changes parameters."""
        if self._owner._inert():
            return
        progress, saving = self._progress, self._saving
        if saving.unfinished or self._opening.engine is None:
            self._between()
        else:
            progress.step_begins()
        started = time.perf_counter()
        try:
            self._gate.enter()
            # Noted after `finish`: otherwise a flush before that would count the coming step's rows as saved.
            if self.touched is not None:
                self._note_touched()
        finally:
            saving.stats.stalled(started)

    def after(self) -> None:
        """Count an iteration that has ended, and save what is due."""
        if self._owner._inert():
            self._watch.stepped()  # a loop may train after SIGTERM, until the grace period is over
            return
        with self._held:  # no flush can run between these parts
            request = self._end()
            if request is not None:
                self._owner._grant(request)
            self._save()

    def _between(self) -> None:
        """Finish the current copy before parameters change. Raises UsageError if the run was not resumed."""
        if self._opening.engine is None and self._progress.head_step == 0:
            self._opening.require_looked()
        self._progress.step_begins()
        self._finish()

    def _finish(self) -> None:
        """Wait for the current copy, if any, and queue it."""
        if not self._saving.unfinished:
            return
        with self._gate.held():
            started, part = time.perf_counter(), self._saving.under_way
            try:
                self._saving.finish(hook=True)
            finally:
                self._saving.stats.stalled(started, part=part)
                if part and self._regular:
                    self._saving.spent()

    def _end(self) -> Request | None:
        """Count the iteration, right after the last optimizer's step. Return the recovery that is due, if any."""
        progress, saving, engine = self._progress, self._saving, self._opening.engine
        saving.moment = None
        saving.streams.follow()
        self._requests.receive()
        progress.head_step += 1  # before a flush can run
        progress.caveats.withdraw(*PASSING)
        self._gate.leave(progress.patience)
        self._watch.stepped()
        if not self._savable:
            try:
                self._binding.require_savable()
            except LayoutMismatch as error:
                if engine is None:
                    raise
                saving.fault(error)  # the loop has changed the state that was resumed
            self._savable = True
        if engine is None:
            return None
        engine.arena.reach(progress.head_step)
        # While the host is about to shut down, memory stays as it was flushed.
        self._regular = engine.pace.due(progress.head_step) and not engine.leaving.now
        saving.stats.interval = engine.cadence.interval
        try:
            return self._requests.recovery(engine.selector, regular=self._regular)
        except ScarError as error:
            saving.fault(error)
            return None

    def _save(self) -> None:
        """Start the checkpoint that is due after this step. The first step saves the whole state."""
        saving, step, moment = self._saving, self._progress.head_step, None
        due = self._due(step)
        started = time.perf_counter()
        try:
            if due is not None or self._flush_on_signal:
                moment = saving.take(early=not self._progress.loop.used)
            self._progress.step_ended(step, moment)
            if due is not None:
                saving.begin(moment, due, thorough=not self._regular)
        finally:
            saving.stats.stalled(started, first=due is not None, part=due is not None)

    def _due(self, step: int) -> Turn | None:
        engine = self._opening.engine
        if engine is None:
            with without_collection():
                layout = self._binding.build_layout()
                self._opening.start(layout, step)
                self._binding.advise(layout)
            return Turn.WHOLE
        regular = None
        if self._regular:
            engine.expect(step)
            self._compare_ranks(differ=engine.selector.differs)
            regular = engine.pace.turn(step)
        return self._requests.due(regular)

    def _compare_ranks(self, *, differ: bool) -> None:
        """Say when ranks begin to differ, and withdraw it once they agree again. The journal keeps both."""
        if differ:
            self._progress.caveats.say("ranks-differ", _DIFFER)
        elif self._differ:
            self._progress.caveats.withdraw("ranks-differ")
        if differ != self._differ:
            self._journal.add("ranks differ" if differ else "ranks agree", self._progress.head_step)
        self._differ = differ

    def _note_touched(self) -> None:
        engine = self._opening.engine
        if engine is None or self.touched is None:
            return
        try:
            engine.tracker.touch(self.touched())
        except Exception as error:
            engine.tracker.give_up_touched()
            self._saving.fault(error)
