"""Keep the requests to a session, and return those that are due after a step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from scarctl.checkpoint.copied import Extent
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.selector import Selector
from scarctl.daemon.request import Request
from scarctl.errors import ScarError, error_fields
from scarctl.recovery.report import Report
from scarctl.session.peers import Together

log = logging.getLogger("scarctl")


class Requests:
    """Requests to a session that are not fulfilled yet."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self._arrived: deque[Extent] = deque()
        """Checkpoints that other threads have requested since the newest step."""
        self._requested: Extent | None = None
        """The requested checkpoint."""
        self._tried = False
        """The newest checkpoint was a requested partial one."""
        self._waiting: deque[Request] = deque()
        """Requests that all ranks have to fulfil after the same step."""
        self.flush: Callable[[Request], None] = lambda _: None
        """Fulfils a request that need not wait for a step. Called in the thread that receives it; returns at once."""

    def add(self, request: Request) -> None:
        """Keep a request until the next step has ended. Called from any thread."""
        if request.kind == "flush":
            self.flush(request)
        elif request.kind == "recover" or (request.kind == "full" and self._together.several):
            self._waiting.append(request)
        else:
            self._arrived.append(Extent.WHOLE if request.kind == "full" else Extent.PART)

    def receive(self) -> None:
        """Take in the checkpoints requested so far. Call it before a step's end becomes visible to other processes.

        A command waits for a newer step than it has seen, so a request that comes later has to wait for the next step.
        """
        while self._arrived:
            extent = self._arrived.popleft()
            if extent is Extent.WHOLE or self._requested is None:
                self._requested = extent

    def missed(self) -> None:
        """Repeat a requested partial checkpoint that copied nothing although something has changed."""
        if self._tried:
            self._arrived.append(Extent.PART)

    def recovery(self, selector: Selector, *, regular: bool) -> Request | None:
        """Return the recovery that all ranks carry out after this same step. Call it once after every step.

        regular: a regular checkpoint is due.

        Raises ScarError if ranks cannot exchange their requests.
        """
        request = self._together.grant(self._waiting, selector, regular=regular)
        if request is not None and request.kind == "full":
            self._requested = Extent.WHOLE
            return None
        return request

    def due(self, engine: Engine, *, regular: bool) -> Extent | None:
        """Return the checkpoint that is due: the regular or a requested one; None: no checkpoint is due.

        A requested partial checkpoint waits while all partitions are pending, because it could not save any.
        """
        requested = self._requested
        if requested is Extent.WHOLE or (requested is not None and engine.may_copy):
            self._requested, self._tried = None, requested is Extent.PART
            return requested
        self._tried = False
        if not regular:
            return None
        return Extent.WHOLE_UNLESS_BEHIND if engine.settings.policy == "full" else Extent.PART


def answer(recover: Callable[[], Report], step: int, together: Together) -> dict[str, Any]:
    """Recover, and return the answer to the command. Training continues if the recovery fails."""
    try:
        report = recover().to_json()
        counts = together.gather([report["restored_partitions"], report["bytes"]])
    except ScarError as error:
        log.error("a requested recovery failed: %s", error)
        return {"error": error_fields(error)}
    return {"step": step, "report": report, "ranks": counts}
