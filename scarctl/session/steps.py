"""Do a session's work before an iteration changes parameters, and after it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import getpid
from typing import TYPE_CHECKING, Protocol

import torch

from scarctl.adapter import Watching
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.step_end import check_step
from scarctl.errors import LayoutMismatch, ScarError, UsageError
from scarctl.policy.turns import Turn
from scarctl.session.opening import Parts
from scarctl.session.progress import UNKNOWN
from scarctl.session.requests import Requests
from scarctl.session.saving import Saving
from scarctl.util.collection import without_collection

if TYPE_CHECKING:
    from scarctl.daemon.request import Request

log = logging.getLogger("scarctl")

_DIFFER = (
    "ranks have different values of parameters that they should have in common, as under DistributedDataParallel: one "
    "rank's are saved, and all ranks resume with them. Name only equal ones in scarctl.Ranks(replicated=...)"
)


class Follower(Protocol):
    """Something that follows a session from outside: a rehearsal."""

    def stepped(self) -> None:
        """Note that a step has ended, and what was due after it."""

    def closing(self, *, failed: bool) -> None:
        """Note that the session is about to close. failed: after an exception."""

    def doomed(self) -> None:
        """Note that the loop goes on, although a signal ends the process."""


class Owner(Protocol):
    """The methods of a session that its steps call."""

    follower: Follower | None

    def _check_open(self) -> None:
        """Raise UsageError if the session is closed, or another process's."""

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
        self._several = parts.together.several
        self._pid = getpid()
        self._savable = False
        """Whether the state was found to be savable."""
        self._counted = False
        """A step has ended, and what is due after it is not saved yet."""
        self._first = False
        """The first step of a new run has ended, and the whole state is to be saved."""
        self._regular = False
        """A regular checkpoint is due after the newest step."""
        self._differ = False
        """Ranks were found to differ, and not yet to agree again."""
        parts.progress.loop.ended = self.declared
        saving.repeat = requests.repeat

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
        saving = self._saving
        if saving.over or getpid() != self._pid:
            return
        if saving.unfinished or self._opening.engine is None:
            self._between()
        self._gate.enter()
        # Noted after `finish`: otherwise a flush before that would count the coming step's rows as saved.
        engine = self._opening.engine
        if self.touched is not None and engine is not None:
            try:
                engine.tracker.touch(self.touched())
            except Exception as error:
                engine.tracker.give_up_touched()
                saving.fault(error)

    def after(self) -> None:
        """Count an iteration that has ended. Save what is due, unless the loop declares its end later."""
        saving, progress, follower = self._saving, self._progress, self._owner.follower
        if saving.over or getpid() != self._pid:
            if saving.doomed and follower is not None:
                follower.doomed()
            return  # a loop may train after SIGTERM, until the grace period is over
        if progress.loop.used and not progress.owned and self._savable:
            saving.moment, self._counted = None, True
            progress.head_step += 1  # before a flush can run
            self._gate.leave(declared=False)
            if follower is not None:
                follower.stepped()
            return
        later = progress.loop.used and not progress.owned
        with self._held:  # no flush can run between these parts
            self._count(declared=not later)
            if not later:
                self._end()
        if follower is not None:
            follower.stepped()

    def declared(self) -> None:
        """Save what is due after the newest step, whose end the loop has just declared; perhaps once more."""
        progress, saving = self._progress, self._saving
        if saving.over or progress.owned or self._opening.engine is None or getpid() != self._pid:
            return
        with self._held:
            self._gate.leave()
            if self._counted:
                self._end()
                return
            # The loop may have changed weights and extras since, as after an epoch.
            self._finish()
            saving.moment = None
            if self._flush_on_signal:
                saving.take()

    def closing(self, *, failed: bool) -> None:
        """Note that the session is about to close. failed: after an exception."""
        follower = self._owner.follower
        if follower is None:
            return
        if self._saving.doomed:
            follower.doomed()
        elif not self._saving.over and getpid() == self._pid:
            follower.closing(failed=failed)

    def _between(self) -> None:
        """Finish the current copy before parameters change. Raises UsageError if the run was not resumed."""
        if self._opening.engine is None and self._progress.head_step == 0:
            self._opening.require_looked()
        self._finish()

    def _finish(self) -> None:
        """Wait for the current copy, if any, and complete it."""
        if not self._saving.unfinished:
            return
        with self._held:
            started, part = time.perf_counter(), self._saving.under_way
            try:
                self._saving.finish(hook=True)
            finally:
                self._saving.stats.stalled(started, part=part)
                if part and self._regular:
                    self._saving.spent()

    def _count(self, *, declared: bool) -> None:
        """Count the iteration, right after the last optimizer's step."""
        progress, saving = self._progress, self._saving
        saving.moment = None
        progress.head_step += 1  # before a flush can run
        self._gate.leave(declared=declared)
        self._counted = True
        if self._savable:
            return
        self._watch.stepped()
        try:
            self._binding.require_savable()
        except LayoutMismatch as error:
            if self._opening.engine is None:
                raise
            saving.fault(error)  # the loop has changed the state that was resumed
        self._savable = True
        if not progress.declares:
            log.warning("%s: %s", self._opening.store.url, UNKNOWN)
        if self._opening.engine is None:
            self._open()

    def _open(self) -> None:
        """Open the engine after the first step of a new run."""
        with without_collection():
            layout = self._binding.build_layout()
            self._opening.start(layout, self._progress.head_step)
            self._binding.advise(layout)
        self._first = True

    def _end(self) -> None:
        """Save what is due after the newest step. The first step saves the whole state."""
        progress, saving, engine = self._progress, self._saving, self._opening.engine
        assert engine is not None, "the first step has opened it"
        step, moment = progress.head_step, None
        self._counted = False
        saving.streams.follow()
        requests = self._requests
        again = saving.left_out and engine.arena.writable
        if again:
            saving.left_out = False
            requests.again()
        elif not saving.left_out:
            requests.begun = None
        if requests.arrived:
            requests.receive()
        engine.arena.reach(step)
        due: Turn | None = Turn.WHOLE
        if self._first:
            self._first = False
        else:
            # While the host is about to shut down, memory stays as it was flushed.
            # Ranks exchange what they know in every regular checkpoint, so one rank alone makes none.
            self._regular = engine.pace.due(step) or (again and not self._several)
            self._regular = self._regular and not engine.pace.leaving
            saving.stats.interval = engine.cadence.interval
            if requests.waiting or self._several:
                self._recover(engine)
            due = self._due(engine, step) if self._regular or requests.requested is not None else None
        started = time.perf_counter()
        try:
            if due is not None or self._flush_on_signal:
                moment = saving.take()
            if due is not None:
                saving.begin(moment, due, thorough=not self._regular)
        finally:
            if due is not None:
                saving.stats.stalled(started, first=True, part=True)
                if self._regular and not saving.under_way:
                    saving.spent()

    def _recover(self, engine: Engine) -> None:
        """Carry out a command's recovery, if one is due."""
        try:
            request = self._requests.recovery(engine.selector, regular=self._regular)
        except ScarError as error:
            self._saving.fault(error)
        else:
            if request is not None:
                self._owner._grant(request)

    def _due(self, engine: Engine, step: int) -> Turn | None:
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
