"""Keep one session's pace: find when a checkpoint is due and when it is the store's turn; say so, and warn."""

from __future__ import annotations

import logging
import math
import time

from scarctl.arena.arena import Arena
from scarctl.checkpoint.behind import Behind
from scarctl.checkpoint.selector import LAG, Selector
from scarctl.config import SessionSettings
from scarctl.policy.interval import Cadence
from scarctl.policy.turns import DAY, MAX_TURN, Turn, Turns, part_requests, per_day
from scarctl.state.caveats import Caveats
from scarctl.util.text import counted, human_bytes, span

log = logging.getLogger("scarctl")

KIND = "seldom"
"""Kind of the caveat that memory has checkpoints more seldom than `max_loss` says."""
_SETTLED = 4
"""Checkpoints of known cost after which the pace is logged."""
_OTHER = 2.0
"""Factor by which the pace changes until it is logged again."""
_AGAIN = 16
"""Fewest checkpoints between two such lines."""
TURN = "turn"
"""Kind of the caveat that the store takes too long for all of the state."""


class Pace:
    """The pace of one session's checkpoints. Used by the training thread."""

    def __init__(
        self,
        settings: SessionSettings,
        state_bytes: int,
        part_bytes: int,
        selector: Selector,
        arena: Arena,
        caveats: Caveats,
    ) -> None:
        """state_bytes: of the whole state. part_bytes: of a partial turn. caveats: gets one while copies get old."""
        self.cadence = Cadence(
            None if settings.interval == "auto" else settings.interval,
            overhead=settings.overhead,
            max_loss=settings.max_loss,
            shared=selector.shared,
        )
        self.turns = Turns(
            state_bytes=state_bytes,
            part_bytes=part_bytes,
            max_lag=settings.max_lag,
            max_bandwidth=settings.max_bandwidth,
            whole=settings.policy == "full",
        )
        self.due_at = -1
        """The step of the newest regular checkpoint."""
        self._settings = settings
        self._state_bytes = state_bytes
        self._part_bytes = part_bytes
        self._selector = selector
        self._arena = arena
        self._caveats = caveats
        self._behind = Behind(caveats, fixed=self.cadence.fixed)
        self._served, self._failures = arena.served, arena.failed_saves
        """The newest request that was served, and the failures until then."""
        self._skip = 0
        self._leaving_until = -math.inf
        """Checkpoints at which ranks have agreed on a turn before they knew of the newest one."""
        self._checkpoints = 0
        self._said: float | None = None
        """Seconds between two checkpoints that were logged last."""
        self._said_at, self._said_all = 0, False
        """The checkpoint at which that was, and whether the store's part was known."""

    def due(self, step: int) -> bool:
        """Return whether a regular checkpoint is due after `step`. Call it once after every iteration."""
        now, turns, served = time.monotonic(), self.turns, self._arena.served
        if turns.waiting and min(turns.waiting) <= served:
            turns.look(now, [number for number in turns.waiting if number > served])
        due = self.cadence.due(now, step)
        if due:
            self.due_at = step
            self._selector.proposed = self.cadence.proposed
        return due

    def leave(self, deadline: float) -> None:
        """Note that the host shuts down at `deadline`, on the monotonic clock. Regular checkpoints pause until then."""
        self._leaving_until = deadline

    @property
    def leaving(self) -> bool:
        """Whether the host is about to shut down: memory then stays as it is, and is saved in the best order."""
        return time.monotonic() < self._leaving_until

    def turn(self, step: int) -> Turn:
        """Return what the store gets of the regular checkpoint of `step`. Call it once for each."""
        turns, arena = self.turns, self._arena
        if arena.served != self._served:
            self._served, self._failures = arena.served, arena.failed_saves
        # While saving fails, that is said, and is the reason.
        if arena.failed_saves == self._failures:
            self._behind.look(step, self.lag(step), self.turn_steps, turns, self.cadence.step_seconds)
        self._say(step)
        fixed, mine = self.cadence.fixed, self._wanted()
        due = fixed is None or step % fixed == 0 or self.cadence.crossed
        # Each rank may leave a part out by itself: the others then choose among theirs.
        if not self._selector.shared or (fixed is not None and self._settings.policy != "full"):
            return mine if due else Turn.NOTHING
        skip = self._skip > 0
        self._skip = max(0, self._skip - 1)
        self._selector.wants = mine
        agreed = Turn.NOTHING if skip or not due else self._selector.turn
        if agreed is not Turn.NOTHING:
            self._skip = LAG
        return agreed

    def _wanted(self) -> Turn:
        """Return what this process's store is ready to get. If the interval is a setting, at its next multiple.

        Among ranks: what it will be ready to get when all of them have agreed.
        """
        if self.cadence.fixed is None:
            arena = self._arena
            pending = int(arena.layout.partition_bytes[arena.pending()].sum())
            # Everything, before the first copies: what the coming checkpoint copies is pending, too.
            lag = LAG * self.cadence.interval if self._selector.shared else 0
            ready_at = time.monotonic() + lag * (self.cadence.step_seconds or 0.0)
            return self.turns.due(ready_at, pending or self._state_bytes)
        if self._settings.policy == "full":
            return Turn.NOTHING if self.turns.waiting else Turn.WHOLE
        # A part is left out while as much as the state waits.
        room = self.turns.waiting_bytes + self._part_bytes <= max(self._state_bytes, 2 * self._part_bytes)
        return Turn.PART if room else Turn.NOTHING

    @property
    def part_bytes(self) -> int:
        """Bytes that the store gets in the next part."""
        if self.cadence.fixed is not None:
            return self._part_bytes
        return self.turns.room(self.cadence.seconds or 0.0)

    def lag(self, step: int) -> int:
        """Return the iterations since the oldest checkpoint that waits for the store; 0 if none does."""
        # Some may have become durable since the last look.
        served = self._arena.served
        waits = (since for number, since in self.turns.steps() if number > served)
        return max(0, step - next(waits, step))

    @property
    def turn_steps(self) -> int:
        """Iterations in which all of the state is saved once."""
        if (fixed := self.cadence.fixed) is not None:
            whole = self._settings.policy == "full"
            return math.ceil(fixed / (1.0 if whole else min(1.0, self._settings.fraction)))
        return math.ceil(self.turns.turn_seconds / max(self.cadence.step_seconds or 1.0, 1e-9))

    def asked(self, number: int, nbytes: int, step: int, turn: Turn) -> None:
        """Note that request `number`, for `nbytes` bytes of the state of `step`, waits for the store."""
        self.turns.asked(time.monotonic(), number, nbytes, step, turn)

    def _say(self, step: int) -> None:
        """Log the pace when it is first known and after large changes; warn while copies get old."""
        cadence = self.cadence
        self._checkpoints += 1
        self._arena.note_pace(cadence.interval, cadence.share)
        cost, seconds = cadence.cost, cadence.seconds
        if cost is None or seconds is None or self._checkpoints <= _SETTLED:
            return
        said, known = self._said or 0.0, cadence.fixed is not None or self.turns.known
        if (
            self._said is None
            or known > self._said_all
            or (self._checkpoints - self._said_at >= _AGAIN and not said / _OTHER < seconds < said * _OTHER)
        ):
            self._said, self._said_at, self._said_all = seconds, self._checkpoints, known
            log.info("step %d: %s", step, self._described(cost, seconds))
        self._warn(step, cost, seconds)

    def _described(self, cost: float, seconds: float) -> str:
        text = (
            f"memory has a whole checkpoint every {span(seconds)}; one costs {1e3 * cost:.3g} ms of training, waiting "
            "and copying"
        )
        fixed = self.cadence.fixed
        if fixed is not None:
            turns = int(DAY / max(fixed * (self.cadence.step_seconds or 1.0), 1e-3))
            daily = per_day(
                turns * self._part_bytes, turns * part_requests(self._part_bytes, self._state_bytes)
            )
            what = f"a part every {counted(fixed, 'iteration')}: {daily}"
        elif not self.turns.known:
            return f"{text}. The store's speed is not known yet"
        else:
            what = self.turns.told
        return f"{text}. The store gets {what}"

    def _warn(self, step: int, cost: float, seconds: float) -> None:
        if self.cadence.too_costly:
            self._caveats.say(
                KIND,
                f"step {step}: a checkpoint in memory costs {span(cost)} of training, so they are {span(seconds)} "
                f"apart, more than max_loss={self._settings.max_loss:g} s: even twice overhead="
                f"{self._settings.overhead:g} does not allow more. Give a larger overhead, or more processor cores",
                once=True,
            )
        else:
            self._caveats.withdraw(KIND)
        turns = self.turns
        if self.cadence.fixed is not None or turns.backlog_seconds <= MAX_TURN:
            self._caveats.withdraw(TURN)
            return
        if turns.bound == "max_bandwidth":
            why = f"max_bandwidth={human_bytes(int(self._settings.max_bandwidth or 0))}/s allows no more"
            remedy = "Give a larger max_bandwidth"
        else:
            size = human_bytes(self._part_bytes)
            why = f"it takes {human_bytes(int(turns.bandwidth or 0))}/s in parts of {size}"
            remedy = (
                "Use a faster store or network; if parts are small, a larger fraction, and larger and fewer "
                "partitions, make fewer requests"
            )
        self._caveats.say(
            TURN,
            f"step {step}: the store takes {span(turns.backlog_seconds)} for all that has changed, more than "
            f"{span(MAX_TURN)}, because {why}: its copies get old. Memory has newer ones, and with peers other hosts "
            f"have them, too. {remedy}",
            once=True,
        )
