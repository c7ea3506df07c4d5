"""Keep the requests to a session, and return those that are due after a step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scarctl.checkpoint.selector import Selector
from scarctl.errors import ScarError, error_fields
from scarctl.policy.turns import Turn
from scarctl.recovery.report import Report
from scarctl.session.peers import Together

if TYPE_CHECKING:
    from scarctl.daemon.request import Request

log = logging.getLogger("scarctl")


class Requests:
    """Requests to a session that are not fulfilled yet."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self.arrived: deque[Turn] = deque()
        """Checkpoints that other threads have requested since the newest step."""
        self.requested: Turn | None = None
        """What the store is to get of the requested checkpoint."""
        self.begun: Turn | None = None
        """What was requested of checkpoints that were begun; None once one was made, and not left out."""
        self.waiting: deque[Request] = deque()
        """Requests that all ranks have to fulfil after the same step."""
        self.flush: Callable[[Request], None] = lambda _: None
        """Fulfils a request that need not wait for a step. Called in the thread that receives it; returns at once."""

    def add(self, request: Request) -> None:
        """Keep a request until the next step has ended. Called from any thread."""
        if request.kind == "flush":
            self.flush(request)
        elif request.kind == "recover" or (request.kind == "full" and self._together.several):
            self.waiting.append(request)
        else:
            self.arrived.append(Turn.WHOLE if request.kind == "full" else Turn.PART)

    def receive(self) -> None:
        """Take in the checkpoints requested so far. Call it before a step's end becomes visible to other processes.

        A command waits for a newer step than it has seen, so a request that comes later has to wait for the next step.
        """
        while self.arrived:
            self.requested = max(self.arrived.popleft(), self.requested or Turn.NOTHING)

    def repeat(self, turn: Turn) -> None:
        """Request this once more if the checkpoint is left out."""
        self.begun = max(turn, self.begun or Turn.NOTHING)

    def again(self) -> None:
        """Request once more what was requested of checkpoints that were left out."""
        if self.begun is not None:
            self.requested = max(self.begun, self.requested or Turn.NOTHING)

    def recovery(self, selector: Selector, *, regular: bool) -> Request | None:
        """Return the recovery that all ranks carry out after this same step. Call it once after every step.

        regular: a regular checkpoint is due.

        Raises ScarError if ranks cannot exchange their requests.
        """
        request = self._together.grant(self.waiting, selector, regular=regular)
        if request is not None and request.kind == "full":
            self.requested = Turn.WHOLE
            return None
        return request

    def due(self, regular: Turn | None) -> Turn | None:
        """Return what the store gets of the checkpoint that is due: a regular or a requested one; None: none is due.

        regular: what it gets of the regular one; None if that is not due.
        """
        requested, self.requested = self.requested, None
        if requested is not None:
            self.repeat(requested)
        if requested is None or regular is None:
            return regular if requested is None else requested
        return max(requested, regular)


def answer(recover: Callable[[], Report], step: int, together: Together) -> dict[str, Any]:
    """Recover, and return the answer to the command. Training continues if the recovery fails."""
    try:
        report = recover().to_json()
        counts = together.gather([report["restored_partitions"], report["bytes"]])
    except ScarError as error:
        log.error("a requested recovery failed: %s", error)
        return {"error": error_fields(error)}
    return {"step": step, "report": report, "ranks": counts}
