"""Keep one session's pace: find when a checkpoint is due, log the interval and its cost, warn if copies get old."""

from __future__ import annotations

import logging
import math
import time

from scarctl.arena.arena import Arena
from scarctl.arena.queue import HandOverQueue
from scarctl.checkpoint.selector import Selector
from scarctl.config import SessionSettings
from scarctl.errors import ScarError
from scarctl.policy.interval import Cadence
from scarctl.state.caveats import Caveats
from scarctl.state.version import step_of
from scarctl.util.text import counted

log = logging.getLogger("scarctl")

KIND = "seldom"
"""Kind of the caveat."""
OLD_SECONDS = 600.0
"""Seconds for saving the whole state once, above which copies are called old."""
LOOKS = 16
"""Iterations before a checkpoint in which distances are computed ahead. The others, undisturbed, are the baseline."""
_SETTLED = 4
"""Checkpoints of known cost after which the choice is logged."""
_OTHER = 2.0
"""Factor by which the interval changes until the choice is logged again."""

_AGAIN = 16
"""Fewest checkpoints between two such lines."""


class Pace:
    """The pace of one session's regular checkpoints. Used by the training thread."""

    def __init__(
        self,
        settings: SessionSettings,
        checkpoint_bytes: int,
        selector: Selector,
        arena: Arena,
        queue: HandOverQueue,
        caveats: Caveats,
    ) -> None:
        """checkpoint_bytes: bytes of the largest checkpoint. caveats: gets a caveat while copies get old."""
        automatic = settings.interval == "auto"
        self.cadence = Cadence(
            None if settings.interval == "auto" else settings.interval,
            checkpoint_bytes=checkpoint_bytes,
            max_bandwidth=settings.max_bandwidth,
            overhead=settings.overhead if automatic else math.inf,
            divisible=settings.policy != "full" and not selector.shared,
            shared=selector.shared,
        )
        self.due_at = -1
        """The step of the newest regular checkpoint."""
        self._settings = settings
        self._selector = selector
        self._arena = arena
        self._queue = queue
        self._caveats = caveats
        self._looked = False
        """Distances were computed alongside the newest iteration."""
        self._checkpoints = 0
        self._said: int | None = None
        """The interval that was logged last."""
        self._said_at = 0

    @property
    def looks(self) -> bool:
        """Whether the next checkpoint is near enough for computing distances ahead, and iterations may be disturbed."""
        return not self.cadence.overhead.probing and self.cadence.left(self._arena.head_step) <= LOOKS

    def look(self) -> float:
        """Note that distances are computed alongside the next iteration; return the share of them that is due there."""
        self._looked = True
        return 1 / min(self.cadence.interval, LOOKS)

    def due(self, step: int, stalled: float) -> bool:
        """Return whether a regular checkpoint is due after `step`. Call it once after every iteration.

        stalled: seconds of the iteration that the training thread spent in hooks and waiting.
        """
        cadence, waiting = self.cadence, self.cadence.waiting
        if waiting and not self._queue.has(min(waiting)):  # they become durable in order
            try:
                waiting = self._queue.numbers()
            except ScarError:
                if not (cadence.fixed or cadence.shared):
                    return True  # the checkpoint will meet the same fault, and report it
        looked, self._looked = self._looked, False
        due = cadence.due(time.monotonic(), step, waiting, stalled=stalled, busy=looked)
        if due:
            self.due_at = step
            self._selector.proposed = cadence.proposed
            self._say(step)
        return due

    def handed_over(self, number: int, version: int, nbytes: int) -> None:
        """Note that a hand-over of `nbytes` bytes of state waits for the store."""
        regular = step_of(version) == self.due_at
        self.cadence.handed_over(time.monotonic(), number, nbytes, regular=regular)

    def _say(self, step: int) -> None:
        """Log the chosen interval when it is first known and after large changes; warn while copies get old."""
        cadence, cost = self.cadence, self.cadence.overhead.cost
        seconds = cadence.overhead.step_seconds
        self._checkpoints += 1
        self._arena.note_pace(cadence.interval, cadence.overhead.share)
        if cost is None or not seconds or self._checkpoints <= _SETTLED:
            return
        interval = cadence.interval
        said = self._said or 0
        again = not self._said or self._checkpoints - self._said_at >= _AGAIN
        steady = cadence.fixed or cadence.overhead.probing or said / _OTHER < interval < said * _OTHER
        if again and not steady:
            self._said, self._said_at = interval, self._checkpoints
            log.info("step %d: %s", step, self._chosen(seconds))
        self._warn(step, seconds)

    def _chosen(self, seconds: float) -> str:
        cadence, overhead = self.cadence, self.cadence.overhead
        cost = overhead.cost
        assert cost is not None
        by_budget = overhead.interval >= cadence.interval > 1
        limit = f"overhead={overhead.budget:g} allows" if by_budget else "the store allows"
        text = (
            f"interval={cadence.interval} is chosen, {self._every(seconds)}: as often as {limit}. A checkpoint costs "
            f"{1e3 * cost.seconds:.3g} ms of training: {1e3 * cost.stalled:.3g} ms in hooks and waiting, "
            f"{1e3 * max(0.0, cost.slowed):.3g} ms by slower iterations alongside it"
        )
        hooks = overhead.hook_seconds
        if hooks > overhead.budget * seconds:
            text += (
                f". The hooks of every iteration take {1e3 * hooks:.2g} of its {1e3 * seconds:.3g} ms, which is more "
                "than the overhead that was allowed: flush_on_signal=False makes them shorter"
            )
        return text

    def _every(self, seconds: float) -> str:
        turn = self._turn()
        return (
            f"{_time(self.cadence.interval * seconds)} apart; all of the state is saved once in "
            f"{counted(turn, 'iteration')} ({_time(turn * seconds)})"
        )

    def _turn(self) -> int:
        whole = self._settings.policy == "full"
        share = 1.0 if whole else self._settings.fraction * self.cadence.share
        return math.ceil(self.cadence.interval / min(1.0, share))

    def _warn(self, step: int, seconds: float) -> None:
        overhead, turn = self.cadence.overhead, self._turn() * seconds
        cost = overhead.cost
        if self.cadence.fixed or cost is None or turn < OLD_SECONDS / _OTHER:
            self._caveats.withdraw(KIND)
        elif turn > OLD_SECONDS and overhead.interval >= self.cadence.interval > 1:
            more = "more than" if overhead.bounded else "all that"
            self._caveats.say(
                KIND,
                f"step {step}: copies get old: a checkpoint takes {_time(cost.seconds)} of training, so they are "
                f"{self._every(seconds)}, which is {more} overhead={overhead.budget:g} allows. "
                f"Give a larger overhead, such as {3 * overhead.budget:g}, a smaller fraction, or an interval",
                inexact=False,
            )


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
