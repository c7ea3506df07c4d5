"""Drive the persister's state machine with the real memory, store and clock, in a thread."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from scarctl.errors import AccessDenied, ScarError, Unavailable
from scarctl.persist.persister import Interrupted, Persister
from scarctl.persist.retry import Halt, Instruction, Machine, Persist, Phase, Stopped, Wake
from scarctl.store.term import now
from scarctl.util.niceness import be_polite

if TYPE_CHECKING:
    from scarctl.persist.evacuated import Evacuated
    from scarctl.persist.evacuation import Copies, Evacuation
    from scarctl.persist.space import SpaceFields

log = logging.getLogger("scarctl")

_REFUSALS = 3
# A separate generator: the global one belongs to the training, which may run in the same process.
_random = random.Random()


class Current(Enum):
    """Treatment of the request that is being served when saving ends."""

    FINISH = "finish"
    """Wait until it is durable."""
    INTERRUPT = "interrupt"
    """Leave it, to be served later. Commits that are made count."""


@dataclass(slots=True)
class PersisterStats:
    """Counts of the thread's work."""

    requests: int = 0
    """Number of requests served."""
    nbytes: int = 0
    """Bytes of state written."""
    busy_seconds: float = 0.0
    saved_at: str | None = None
    """UTC time at which the newest request became durable, in ISO 8601."""
    errors: int = 0


def late() -> Unavailable:
    """Return the reason why requests still wait although nothing has failed."""
    hint = "wait longer, or save less often"
    return Unavailable("the store has not finished yet", hint=hint, kind="store-late")


_Event = Callable[[], list[Instruction]]
"""A call of one of the machine's methods."""


class _Look:
    """Request that the thread reads the words in memory, which creates the event."""


@dataclass(slots=True, eq=False)
class _Evacuate:
    """Request that the thread saves what it can before a deadline."""

    deadline: float
    copies: Copies | None
    made: Evacuation | None = None
    ended: bool = False


class PersisterThread:
    """Serves requests in the background until `close`. Failures of the store do not raise: see `failure`."""

    def __init__(self, persister: Persister) -> None:
        """Start the thread."""
        self.stats = PersisterStats()
        self.last_error: ScarError | None = None
        """The newest failure since the last success."""
        self.failure: ScarError | None = None
        """The failure that halted the thread permanently; None while it works."""
        self.store_deleted = False
        """Whether the store was found deleted for certain at the newest failure: see `Store.is_deleted`."""
        self._persister = persister
        self._machine = Machine()
        self._changed = threading.Condition()
        self._refusals = 0
        self._obeying = self._ended = False
        self._evacuating: _Evacuate | None = None
        """The evacuation under way."""
        self._events: list[_Event | _Look | _Evacuate] = [_Look()]
        self._thread = threading.Thread(target=self._run, name="scarctl-persister", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Look for requests, because one was made."""
        self._send(_Look())

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all requests are durable. Return whether they are.

        If the store refuses access a few times meanwhile, return at once: waiting longer would not help.
        """
        self._send(_Look(), self._machine.hurry)
        with self._changed:
            most = self._refusals + _REFUSALS
            self._changed.wait_for(
                lambda: self._settled() or self._ended or self.failure is not None or self._refusals >= most,
                timeout,
            )
            return self._settled()

    def evacuate(self, seconds: float, copies: Copies | None = None) -> Evacuated:
        """Save what the time allows, the most changed per byte first, and report what is safe.

        Interrupts the current request, and returns in time even if the store hangs. Usual saving then continues.
        copies: the arena's copies on other hosts. Copies that these lack are saved first; the others count as safe.
        """
        from scarctl.persist.evacuation import Evacuation, before

        request = _Evacuate(before(time.monotonic() + seconds, seconds), copies)
        with self._changed:
            if self._evacuating is None or request.deadline < self._evacuating.deadline:
                self._persister.interrupt.set()  # one that ends earlier is waited for
            # Before all waiting events except the thread's end, and after the result of the interrupted one.
            self._events.insert(int(self._events[:1] == [self._machine.stop]), request)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: request.ended or self._ended, max(0.0, request.deadline - time.monotonic())
            )
        made = request.made or Evacuation(self._persister.arena, self._persister, 0.0, copies=copies)
        if not (request.ended or made.saved):
            made.error = made.error or self.fault().message
        found = made.report()
        if copies is None or found.safe:
            return found
        copies.wait(request.deadline - time.monotonic())
        return made.report()

    def close(self, current: Current = Current.FINISH) -> None:
        """End the thread. Requests that wait stay. current: treatment of the one being written."""
        if current is Current.INTERRUPT:
            self._persister.interrupt.set()
        with self._changed:
            self._events.insert(0, self._machine.stop)  # before all other events
            self._changed.notify_all()
        self._thread.join()

    def fault(self) -> ScarError:
        """Return the reason why requests are still waiting."""
        return self.failure or (None if self._settled() else self.last_error) or late()

    @property
    def settled(self) -> bool:
        """Whether all requests that the thread knows are durable."""
        return self._settled()

    def _settled(self) -> bool:
        machine = self._machine
        return not (self._events or self._obeying or machine.waiting or machine.phase is Phase.BUSY)

    def _send(self, *events: _Event | _Look | _Evacuate) -> None:
        with self._changed:
            self._events += events
            self._changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            # Otherwise nothing would show that the thread has died.
            log.exception("saving has stopped unexpectedly")
            self._note(error if isinstance(error, ScarError) else _defect(error))
            self.failure = self.last_error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _work(self) -> None:
        be_polite()
        wake_at: float | None = None
        while True:
            # Only after the first request: a run that has just started has more urgent work.
            while self.stats.requests and self._idle() and self._tidy(0):
                pass
            event = self._wait(wake_at)
            wake_at = None
            if isinstance(event, _Evacuate):
                self._evacuate(event)
                event = self._look()
            if isinstance(event, _Look):
                event = self._look()
            with self._changed:
                instructions = event()
            for instruction in instructions:
                if isinstance(instruction, Stopped):
                    return
                if isinstance(instruction, Wake):
                    wake_at = instruction.at
                else:
                    self._obey(instruction)
            with self._changed:
                self._obeying = False
                self._changed.notify_all()

    def _idle(self) -> bool:
        with self._changed:
            return not self._events and self._machine.phase is Phase.IDLE

    @property
    def space(self) -> SpaceFields:
        """See `Persister.space`."""
        return self._persister.space

    def _look(self) -> _Event:
        arena = self._persister.arena
        return partial(self._machine.asked, arena.asked if arena.waits else 0)

    def _evacuate(self, request: _Evacuate) -> None:
        """Carry out an evacuation, independently of the request that the machine counts as being served.

        One with an earlier deadline that comes meanwhile is carried out first.
        """
        outer, again = self._evacuating, True
        while again:
            with self._changed:
                urgent = self._take_evacuation(before=request.deadline)
                if urgent is None:
                    self._evacuating = request
                    self._persister.interrupt.clear()
            if urgent is not None:
                self._evacuate(urgent)
                continue
            again = False
            try:
                self._evacuate_once(request)
            except Interrupted:
                with self._changed:  # otherwise the thread is about to end
                    again = bool(self._events) and isinstance(self._events[0], _Evacuate)
            except Exception as error:
                log.exception("evacuating failed unexpectedly")
                self._note(_defect(error))
                if request.made is not None:
                    request.made.error = _defect(error).message
        with self._changed:
            self._evacuating = outer
            request.ended = True
            self._events.append(self._machine.hurry)
            self._changed.notify_all()

    def _evacuate_once(self, request: _Evacuate) -> None:
        from scarctl.persist.evacuation import Evacuation

        made = request.made = Evacuation(
            self._persister.arena,
            self._persister,
            request.deadline,
            earlier=self._persister.pace,
            copies=request.copies,
        )
        if self.failure is not None:
            made.error = self.failure.message
        else:
            made.run(lambda: bool(self._events[:1] == [self._machine.stop]))
            self.stats.nbytes += made.written_bytes

    def _take_evacuation(self, before: float) -> _Evacuate | None:
        """Take a waiting evacuation with an earlier deadline; None without one. Inside `_changed`."""
        for event in self._events:
            if isinstance(event, _Evacuate) and event.deadline < before:
                self._events.remove(event)
                return event
        return None

    def _wait(self, wake_at: float | None) -> _Event | _Look | _Evacuate:
        """Return the next event, or a tick at `wake_at`."""
        with self._changed:
            timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
            if self._changed.wait_for(lambda: self._events, timeout):
                self._obeying = True  # set before memory is read, so that `settled` is False meanwhile
                return self._events.pop(0)
            return partial(self._machine.tick, time.monotonic())

    def _obey(self, instruction: Instruction) -> None:
        if isinstance(instruction, Persist):
            event = self._persist(instruction.number)
            with self._changed:
                # The result of an instruction precedes all other events but `Stop`.
                self._events.insert(int(self._events[:1] == [self._machine.stop]), event)
        elif isinstance(instruction, Halt):
            with self._changed:
                self.failure = self.last_error
                self._changed.notify_all()
            log.error("saving has stopped: %s", self.failure)

    def _persist(self, number: int) -> _Event:
        started = time.monotonic()
        try:
            written = self._persister.persist(number)
            self.stats.nbytes += written
        except ScarError as error:
            self._note(error)
            return self._failed(retryable=_may_pass(error), jitter=_random.random())
        except Interrupted:
            return self._failed(retryable=True)
        except (OSError, MemoryError) as error:
            self._note(Unavailable(f"the state cannot be saved: {error}"))
            return self._failed(retryable=True, jitter=_random.random())
        except Exception as error:
            # A defect in scarctl must be reported, and must not end the training.
            log.exception("saving failed unexpectedly")
            self._note(_defect(error))
            return self._failed(retryable=False)
        finally:
            self.stats.busy_seconds += time.monotonic() - started
        self.stats.requests += 1
        self.stats.saved_at = now()
        self.last_error = None
        # Other requests may wait, so collecting moves at most half of the bytes that were just saved.
        self._tidy(written // 2)
        return partial(self._machine.persisted, number)

    def _failed(self, *, retryable: bool, jitter: float = 0.0) -> _Event:
        return partial(self._machine.failed, time.monotonic(), retryable=retryable, jitter=jitter)

    def _tidy(self, limit: int) -> bool:
        try:
            return self._persister.tidy(limit)
        except Exception:
            log.exception("collecting old copies failed unexpectedly")
            return False

    def _note(self, error: ScarError) -> None:
        # The message is another one in each attempt: it names a new file.
        if self.last_error is None or self.last_error.kind != error.kind:
            log.warning("saving failed, %s: %s", "retrying" if _may_pass(error) else "giving up", error)
        self.store_deleted = self._persister.store_is_deleted()
        self.last_error = error
        self.stats.errors += 1
        self._persister.arena.count_failed_save()
        self._refusals += isinstance(error, AccessDenied)


def _may_pass(error: ScarError) -> bool:
    """Return whether to retry: a disk may be mounted again, or credentials renewed."""
    return error.retryable or isinstance(error, AccessDenied)


def _defect(error: BaseException) -> ScarError:
    return ScarError(f"saving failed unexpectedly: {error!r}", kind="defect")
