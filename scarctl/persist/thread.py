"""Save in a thread: look into memory for what was asked for, save it, and try again after a failure.

The arena's words say which requests wait (`scarctl.arena.fields`), so that nothing is queued here. After a temporary
failure saving is tried again after a growing pause. A permanent one (another writer has taken over) ends it. Requests
then stay.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from scarctl.errors import AccessDenied, ScarError, Unavailable
from scarctl.persist.persister import Interrupted, Persister
from scarctl.store.term import now
from scarctl.util.niceness import be_polite

if TYPE_CHECKING:
    from scarctl.persist.evacuated import Evacuated
    from scarctl.persist.evacuation import Copies, Evacuation
    from scarctl.persist.space import SpaceFields

log = logging.getLogger("scarctl")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Shortest and longest pause before another attempt, in seconds."""
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


def pause_after(failures: int, jitter: float) -> float:
    """Return the seconds until another attempt. jitter: in [0, 1), spreads the attempts of many hosts."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 16)) * (1 + jitter) / 2


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
        self._changed = threading.Condition()
        self._stopping = self._busy = self._ended = False
        self._failures = 0
        """Number of consecutive failures."""
        self._resume_at = -math.inf
        """Time of the next attempt after a failure, on the monotonic clock."""
        self._refusals = 0
        self._evacuations: list[_Evacuate] = []
        """The evacuations that have not ended, the one under way included."""
        self._evacuating: _Evacuate | None = None
        self._thread = threading.Thread(target=self._run, name="scarctl-persister", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Look for requests, because one was made."""
        with self._changed:
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all requests are durable. Return whether they are.

        If the store refuses access a few times meanwhile, return at once: waiting longer would not help.
        """
        with self._changed:
            self._resume_at = -math.inf  # a caller waits
            self._changed.notify_all()
            most = self._refusals + _REFUSALS
            self._changed.wait_for(
                lambda: self.settled or self._ended or self.failure is not None or self._refusals >= most,
                timeout,
            )
            return self.settled

    def evacuate(self, seconds: float, copies: Copies | None = None) -> Evacuated:
        """Save what the time allows, the most changed per byte first, and report what is safe.

        Interrupts the current request, and returns in time even if the store hangs. Usual saving then continues. One
        with an earlier deadline goes first.
        copies: the arena's copies on other hosts. Copies that these lack are saved first; the others count as safe.
        """
        from scarctl.persist.evacuation import Evacuation, before

        request = _Evacuate(before(time.monotonic() + seconds, seconds), copies)
        with self._changed:
            if self._evacuating is None or request.deadline < self._evacuating.deadline:
                self._persister.interrupt.set()  # one that ends earlier is waited for
            self._evacuations.append(request)
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
        with self._changed:
            self._stopping = True
            if current is Current.INTERRUPT:
                self._persister.interrupt.set()
            self._changed.notify_all()
        self._thread.join()

    def fault(self) -> ScarError:
        """Return the reason why requests are still waiting."""
        return self.failure or (None if self.settled else self.last_error) or late()

    @property
    def settled(self) -> bool:
        """Whether all requests are durable, and nothing is being done."""
        return not (self._busy or self._evacuations or self._persister.arena.waits)

    @property
    def space(self) -> SpaceFields:
        """See `Persister.space`."""
        return self._persister.space

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
        tidies = False
        while (task := self._next(tidies)) is not None:
            if task == "tidy":
                tidies = self._tidy(0)
                continue
            if isinstance(task, _Evacuate):
                self._evacuate(task)
            else:
                self._persist(self._persister.arena.asked)
            # Only after the first request: a run that has just started has more urgent work.
            tidies = self.stats.requests > 0
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self, tidies: bool) -> _Evacuate | Literal["persist", "tidy"] | None:
        """Wait for something to do, and return it; None at the end. tidies: whether old copies may be left to collect.

        Then `_busy` is set, unless it is that.
        """
        arena = self._persister.arena
        with self._changed:
            while not self._stopping:
                timeout = None
                if self._evacuations:
                    self._busy = True
                    self._evacuating = min(self._evacuations, key=lambda one: one.deadline)
                    self._persister.interrupt.clear()
                    return self._evacuating
                if arena.waits and self.failure is None:
                    timeout = self._resume_at - time.monotonic()
                    if timeout <= 0:
                        self._busy = True
                        return "persist"
                elif tidies:
                    return "tidy"
                self._changed.wait(timeout)
                tidies = self.stats.requests > 0
        return None

    def _evacuate(self, request: _Evacuate) -> None:
        """Carry out an evacuation, unless it is interrupted: by one with an earlier deadline, or by the end."""
        from scarctl.persist.evacuation import Evacuation

        ended = True
        try:
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
                made.run(lambda: self._stopping)
                self.stats.nbytes += made.written_bytes
        except Interrupted:
            ended = False
        except Exception as error:
            log.exception("evacuating failed unexpectedly")
            self._note(_defect(error))
            if request.made is not None:
                request.made.error = _defect(error).message
        with self._changed:
            self._evacuating = None
            if ended:
                self._evacuations.remove(request)
                request.ended = True
            self._resume_at = -math.inf

    def _persist(self, number: int) -> None:
        started = time.monotonic()
        try:
            written = self._persister.persist(number)
        except Interrupted:
            return
        except ScarError as error:
            self._fail(error, passes=_may_pass(error))
            return
        except (OSError, MemoryError) as error:
            self._fail(Unavailable(f"the state cannot be saved: {error}"), passes=True)
            return
        except Exception as error:
            # A defect in scarctl must be reported, and must not end the training.
            log.exception("saving failed unexpectedly")
            self._fail(_defect(error), passes=False)
            return
        finally:
            self.stats.busy_seconds += time.monotonic() - started
        self._failures = 0
        self.stats.nbytes += written
        self.stats.requests += 1
        self.stats.saved_at = now()
        self.last_error = None
        # Other requests may wait, so collecting moves at most half of the bytes that were just saved.
        self._tidy(written // 2)

    def _fail(self, error: ScarError, *, passes: bool) -> None:
        """Note that serving a request failed. passes: whether to try again after a pause."""
        self._note(error)
        self._failures += 1
        with self._changed:
            if passes:
                self._resume_at = time.monotonic() + pause_after(self._failures, _random.random())
            else:
                self.failure = error
        if not passes:
            log.error("saving has stopped: %s", error)

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
