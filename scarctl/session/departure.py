"""Leave a host in time: bring the newest step into memory, then as much of it to the store as the time allows."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from scarctl.checkpoint.engine import Engine
from scarctl.errors import ScarError
from scarctl.session import signals
from scarctl.session.ending import LastState
from scarctl.session.opening import Parts
from scarctl.session.saving import FLUSH_SECONDS, Saving

if TYPE_CHECKING:
    from scarctl.daemon.request import Request
    from scarctl.persist.evacuated import Evacuated

log = logging.getLogger("scarctl")

_FLUSH_SHARE = 1 / 3
"""Largest fraction of the time left for which a flush waits for a running step to end."""
_POLL = 0.005
_ELSEWHERE = (
    "attach was called outside of the main thread: SIGTERM and SIGINT then save nothing, and the run goes back to the "
    "newest checkpoint in memory. Attach in the main thread; the loop may run in another one"
)


class Departure:
    """Flushes and evacuates one session, from any thread."""

    def __init__(self, parts: Parts, saving: Saving, last: LastState, inert: Callable[[], bool]) -> None:
        """Use the session's parts. inert: returns whether the session is closed, or belongs to another process."""
        self._gate = parts.gate
        self._progress = parts.progress
        self._together = parts.together
        self._opening = parts.opening
        self._settings = parts.settings
        self._grace = parts.settings.grace
        self._saving = saving
        self._last = last
        self._inert = inert

    def evacuate(self, seconds: float, to: str | None = None) -> Evacuated:
        """See `Session.evacuate`."""
        deadline = time.monotonic() + seconds
        flushed = self.flush(deadline, seconds)
        return self._evacuate(deadline, flushed=flushed, to=to)

    def flush(self, deadline: float, seconds: float) -> bool:
        """Bring the newest step into memory, and keep training from saving until the deadline.

        Returns whether it is sealed there, or no newer than what the store has. It waits for a running step for a third
        of `seconds` at most.
        """
        engine = self._opening.engine
        if engine is None:
            return False
        engine.saver.brace(seconds)
        patience = min(FLUSH_SECONDS, seconds * _FLUSH_SHARE)
        with self._gate.quiet(patience) as quiet:
            if self._inert() or not quiet:
                return False
            engine.pace.leave(deadline)
            if self._is_in_store(engine):
                self._saving.filled(patience)  # so that the report knows which commit memory has
                return True
            return self._saving.flush(patience, leaving=True)

    def _evacuate(self, deadline: float, *, flushed: bool, to: str | None = None) -> Evacuated:
        engine = self._opening.engine
        assert engine is not None, "nothing is evacuated before the first step"
        left = max(0.0, deadline - time.monotonic())
        try:
            found = engine.saver.evacuate(left, to)
        except ScarError as error:
            if error.kind == "unknown-host":
                raise
            from scarctl.persist.evacuation import not_evacuated

            found = not_evacuated(engine.arena, error)
        return replace(found, flushed=flushed)

    def _is_in_store(self, engine: Engine) -> bool:
        """Return whether no step has ended since a resume, whose copies the store has: the arena may be empty."""
        return self._saving.resumed_at == self._progress.head_step

    def watch_signals(self) -> Callable[[], None]:
        """Flush and evacuate before signals take effect, if the settings allow it; return a function that ends this."""
        if not self._settings.flush_on_signal:
            return lambda: None
        if threading.current_thread() is not threading.main_thread():
            self._progress.caveats.say("signals", _ELSEWHERE)
        return signals.watch(self.before_signal, patience=self._grace or 0.0)

    def settle(self) -> None:
        """Wait for an evacuation after SIGTERM. The loop may fail meanwhile, as its workers got the signal, too."""
        if self._grace is not None and self._settings.flush_on_signal:
            signals.settle()

    def before_signal(self, signum: int, fatal: bool) -> None:
        """Flush, after SIGTERM or SIGINT. After SIGTERM also evacuate, if there is a grace period. Called in a thread.

        fatal: the signal then ends this process.
        """
        began = time.monotonic()
        grace = self._grace if signum == signal.SIGTERM else None
        patience = FLUSH_SECONDS if grace is None else min(FLUSH_SECONDS, grace * _FLUSH_SHARE)
        flushed = False
        if grace is not None and self._opening.engine is not None and not self._inert():
            self._opening.engine.saver.brace(grace)
        with self._last_step(patience) as quiet, self._saving.streams.joined():
            engine = self._opening.engine
            if self._inert() or engine is None:
                return
            if grace is not None:
                engine.pace.leave(began + grace)
            if quiet:
                flushed = self._last.before_signal(fatal=fatal, patience=patience)
            else:
                log.warning(
                    "a signal arrived in a step that did not end: the state is not flushed%s",
                    ". If no step was running, use session.iteration()" if self._gate.implied else "",
                )
            if fatal:
                self._last.end_now(wait=grace is None)
        if grace is not None:
            from scarctl.persist.evacuation import before

            # Outside the gate: it must not block a training thread that has to end first.
            found = self._evacuate(before(began + grace, grace), flushed=flushed)
            log.log(logging.INFO if found.safe else logging.WARNING, "SIGTERM: %s", sentence(found))

    @contextmanager
    def _last_step(self, patience: float) -> Iterator[bool]:
        """Do as the gate's `quiet`, after the step to which other ranks on this host have come.

        That step has half of `patience` seconds, because it may never end: another rank may have died in it.
        """
        deadline = time.monotonic() + patience / 2
        with self._gate.quiet(patience) as quiet:
            head = self._progress.head_step
            if not (quiet and self._together.several and self._together.behind(self._opening.store, head)):
                yield quiet
                return
        while self._progress.head_step == head and time.monotonic() < deadline:
            time.sleep(_POLL)
        with self._gate.quiet(patience / 2) as quiet:
            yield quiet

    def requested(self, request: Request) -> None:
        """Flush for a command that evacuates the host, in a thread, and answer it. Returns at once."""

        def work() -> None:
            began, seconds = time.monotonic(), request.seconds or 0.0
            try:
                flushed = self.flush(began + seconds, seconds)
            except Exception:
                log.exception("flushing for an evacuation failed")
                flushed = False
            engine = self._opening.engine
            if engine is not None:  # without one there is nothing to save, and nothing to answer
                engine.saver.answer(request.number, {"flushed": flushed})

        threading.Thread(target=work, name="scarctl-flush", daemon=True).start()


def sentence(found: Evacuated) -> str:
    """Describe an evacuation in one line, for the log."""
    mib = 1 << 20
    there = f"{found.peer_bytes / mib:.1f} MiB only in the memory of {', '.join(found.peers)}"
    where = f"safe in the store and {there}" if found.peer_bytes else "safe in the store"
    if found.safe:
        return f"step {found.step} is {where}{f' ({found.label.text})' if found.label.of_one else ''}"
    lost = f"{found.lost_partitions} of {found.total_partitions} partitions"
    newest = "" if found.flushed else "; the newest step was not brought into memory"
    newest += "; the newest extras are lost as well" if found.extras_lost else ""
    why = f" ({found.error})" if found.error else ""
    safe = found.total_bytes - found.lost_bytes
    return (
        f"{safe / mib:.1f} of {found.total_bytes / mib:.1f} MiB are {where}; "
        f"if this host is lost, {lost} go back to older copies: predicted rework {found.rework}{newest}{why}"
    )
