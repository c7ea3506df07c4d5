"""Which checkpoint is due after a step: the regular one, or one that somebody outside has asked for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scarctl.daemon.protocol import error_fields
from scarctl.engine import Engine
from scarctl.errors import ScarError
from scarctl.execution import Report
from scarctl.prediction import Mode
from scarctl.together import Together
from scarctl.wishes import Wish

log = logging.getLogger("scarctl")


@dataclass(frozen=True, slots=True)
class Due:
    """A checkpoint that is due."""

    full: bool
    may_skip: bool = False


class Requests:
    """What a session is asked for, until it is done."""

    def __init__(
        self,
        together: Together,
        recover: Callable[[Sequence[str], Mode, float | None], Report],
        fault: Callable[[Exception], None],
    ) -> None:
        """recover: `Session.recover`. fault: told of what keeps ranks from hearing of each other's wishes."""
        self._together = together
        self._recover = recover
        self._fault = fault
        self._requested: bool | None = None
        """Somebody wants a checkpoint; True: of the whole state."""
        self._wishes: deque[Wish] = deque()
        """What all ranks have to do after the same step."""

    def add(self, wish: Wish) -> None:
        """Somebody wants something after the next step. Called from another thread."""
        if wish.kind == "recover" or (wish.kind == "full" and self._together.several):
            self._wishes.append(wish)
        else:
            self._requested = wish.kind == "full" or bool(self._requested)

    def due(self, engine: Engine, step: int) -> Due | None:
        """What is due after `step`. Recovers what is to be recovered now.

        A checkpoint that somebody asked for waits while nothing could be taken.
        """
        regular = engine.due(step)
        self._fulfil(engine, step, regular=regular)
        whole = engine.settings.policy == "full"
        if regular:
            engine.cadence.agree(engine.selector.interval)
            engine.selector.expect(step, engine.budget_now)
        # A part of what is all on its way would be nothing: whoever asked waits until there is something to take.
        if self._requested or (self._requested is not None and engine.may_copy):
            requested, self._requested = self._requested, None
            return Due(requested)
        return Due(whole, may_skip=whole) if regular else None

    def _fulfil(self, engine: Engine, step: int, *, regular: bool) -> None:
        """Do what all ranks do now. What fails is for whoever asked to know, and ends no training."""
        try:
            wish = self._together.grant(self._wishes, engine.selector, regular=regular)
        except ScarError as error:
            self._fault(error)
            return
        if wish is None:
            return
        if wish.kind == "full":
            self._requested = True
            return
        try:
            report = self._recover(wish.lost, "partial", wish.max_rework).to_json()
            counts = self._together.gather([report["restored_partitions"], report["bytes"]])
            answer: dict[str, Any] = {"step": step, "report": report, "ranks": counts}
        except ScarError as error:
            log.error("what was asked for cannot be recovered: %s", error)
            answer = {"error": error_fields(error)}
        if wish.number:
            engine.saver.answer(wish.number, answer)
