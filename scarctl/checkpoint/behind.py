"""Warn that the store is behind training: by how many iterations, why, and which setting to change."""

from __future__ import annotations

import logging
import math
import time

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.config import SessionSettings
from scarctl.persist.saver import Saver
from scarctl.persist.speed import Speed
from scarctl.policy.interval import Cadence
from scarctl.state.caveats import Caveats
from scarctl.state.version import NEVER, step_of
from scarctl.util.text import counted

log = logging.getLogger("scarctl")

KIND = "behind"
"""Kind of the caveat."""
TURNS = 2
"""Turns above which a lag is reported. A turn is the iterations in which the whole state is saved once."""
_STUCK = 60
"""Seconds after which copies that wait for the store are reported."""
_STARTING = 10.0
"""Seconds of a lag before which a saver that has saved nothing yet is not reported: the daemon may only be starting."""
_LONG = 10
"""Turns without a lag after which a new lag is reported again."""
_HALF = 0.5
_NEW = 0.2  # weight of a new measurement


class Behind:
    """Checks the lag of one session's store whenever a checkpoint is made. Not thread-safe."""

    def __init__(
        self,
        arena: Arena,
        cadence: Cadence,
        settings: SessionSettings,
        logs: int,
        budget: int,
        stored: int,
        caveats: Caveats,
    ) -> None:
        """logs: number of logs that this session saves to. budget: bytes that a checkpoint may save. stored: bytes that
        copies of the whole state take in the store.
        """
        self._arena = arena
        self._cadence = cadence
        self._settings = settings
        self._logs = logs
        self._budget = budget
        self._smaller = stored / arena.layout.nbytes if stored else 1.0
        """Bytes in the store per byte of state: less than 1 if copies are encoded."""
        self._caveats = caveats
        self._said = 0
        """The newest reported lag, in iterations."""
        self._behind_at = 0
        """The newest step at which the lag was more than a turn."""
        self._since = np.full(arena.layout.partitions, NEVER, dtype=np.int64)
        """Per partition, step of its first pending copy since it was last durable; NEVER without a pending copy."""
        self._durable = arena.durable.copy()
        self._seen: tuple[int, float] | None = None
        self._step_seconds: float | None = None
        self._oldest, self._oldest_since = -1, math.inf
        """Step of the oldest pending change, and the time at which it became the oldest."""

    @property
    def turn(self) -> int:
        """Number of iterations in which the whole state is saved once."""
        fraction = 1.0 if self._settings.policy == "full" else self._settings.fraction * self._cadence.share
        return math.ceil(self._cadence.interval / min(1.0, fraction / self._smaller))

    def look(self, pending: NDArray[np.bool_], step: int, saver: Saver) -> None:
        """Report the lag if it has grown too large.

        pending: partitions whose copies wait for the store, bool of shape (partitions,). step: iterations finished.
        """
        now = time.monotonic()
        if self._seen is not None and step > self._seen[0]:
            seconds = (now - self._seen[1]) / (step - self._seen[0])
            before = seconds if self._step_seconds is None else self._step_seconds
            self._step_seconds = before + _NEW * (seconds - before)
        self._seen = step, now
        lag = self.lag(pending, step)
        self._look_for_standstill(step - lag if pending.any() else NEVER, now)
        if lag <= self.turn:
            self._caveats.withdraw(KIND)
            if step > self._behind_at + _LONG * self.turn:
                self._said = 0
            return
        self._behind_at = step
        starting = saver.speed is None and lag * (self._step_seconds or 0.0) < _STARTING
        if lag > TURNS * self.turn and lag >= 2 * self._said and not starting:
            self._said = lag
            self._caveats.say(KIND, self._text(lag, step, saver.speed), inexact=False)

    def lag(self, pending: NDArray[np.bool_], step: int) -> int:
        """Return the iterations since the oldest pending change; 0 if all copies are durable.

        pending, step: see `look`. If a newer copy replaces a pending one, the older change is still pending.
        """
        durable = self._arena.durable.copy()
        # If the store has taken a partition's copy meanwhile, a newer copy waits.
        begins = pending & ((self._since < 0) | (durable != self._durable))
        self._since[~pending] = NEVER
        self._since[begins] = step_of(self._arena.version[begins])
        self._durable = durable
        waiting = self._since[pending]
        return max(0, step - int(waiting.min())) if waiting.size else 0

    def _text(self, lag: int, step: int, speed: Speed | None) -> str:
        turn, interval = self.turn, self._cadence.interval
        text = (
            f"step {step}: the store is {counted(lag, 'iteration')} behind. "
            f"The whole state should be saved every {turn}. "
            "Newer copies are in memory only: lost if this host fails, unless another host has them."
        )
        period = interval * self._step_seconds if self._step_seconds else None
        if speed is None or period is None:
            return f"{text} Nothing was measured yet: `scarctl daemon status` shows the pending copies."
        text += (
            f" Measured: {speed.handover_seconds:.3g} s for a checkpoint, one every {period:.3g} s; "
            f"{speed.bytes_per_second / 1e6:.3g} MB/s and {speed.commits_per_second:.3g} commits/s."
        )
        needed = math.ceil(interval * 1.25 * speed.handover_seconds / period)
        longer = f"interval={max(needed, interval + 1)} or more"
        pace = f'Set {longer}, or interval="auto"' if self._cadence.fixed else f"Set {longer}"
        if speed.processor_share > _HALF:
            share = round(100 * speed.processor_share)
            reason = f"The saving threads wait for a processor {share} % of their time. Leave them one, or: {pace}."
        elif speed.fixed_share is None:
            reason = f"{pace}."
        elif speed.fixed_share > _HALF:
            fewer = (
                f", or a new store: here each checkpoint is {self._logs} commits" if self._logs > 1 else ""
            )
            reason = (
                "Most of that time goes into commits, whatever their size (fsync, requests). "
                f"{pace} with a larger fraction{fewer}."
            )
        else:
            reason = f"Most of that time goes into bytes. {pace}, or a smaller fraction."
        largest = int(self._arena.layout.partition_bytes.max(initial=0))
        if largest > self._budget:
            reason += (
                f" The largest partition has {largest:,} bytes, a checkpoint's budget is {self._budget:,}: "
                "partition_bytes makes it smaller in a new store."
            )
        return f"{text} {reason}"

    def _look_for_standstill(self, oldest: int, now: float) -> None:
        """Warn once if changes of step `oldest` have waited for too long. NEVER: no change waits."""
        if oldest < 0 or oldest != self._oldest:
            self._oldest, self._oldest_since = oldest, now
        elif now > self._oldest_since + _STUCK:
            self._oldest_since = math.inf  # warn only once
            log.warning(
                "copies of step %d have waited for the store for more than %d s: `scarctl daemon status` may show why",
                oldest,
                _STUCK,
            )
