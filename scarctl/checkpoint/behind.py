"""Warn that the store is behind training: by how many iterations, why, and which setting to change."""

from __future__ import annotations

import logging
import math
import time

from scarctl.policy.turns import Turns
from scarctl.state.caveats import Caveats
from scarctl.util.text import counted

log = logging.getLogger("scarctl")

KIND = "behind"
"""Kind of the caveat."""
TURNS = 2
"""Turns above which a lag is reported. A turn is the iterations in which the whole state is saved once."""
_STUCK = 60.0
"""Seconds after which a checkpoint that waits for the store is reported."""
_STARTING = 10.0
"""Seconds of a lag before which a saver that has saved nothing yet is not reported: the daemon may only be starting."""
_LONG = 10
"""Turns without a lag after which a new lag is reported again."""


class Behind:
    """Checks the lag of one session's store whenever a checkpoint is made. Not thread-safe."""

    def __init__(self, caveats: Caveats, *, fixed: int | None) -> None:
        """fixed: iterations between two turns of the store, if that is a setting."""
        self._caveats = caveats
        self._fixed = fixed
        self._said = 0
        """The newest reported lag, in iterations."""
        self._behind_at = 0
        """The newest step at which the lag was more than a turn."""
        self._oldest, self._oldest_since = -1, math.inf
        """Step of the oldest checkpoint that waits, and the time at which it became the oldest."""

    def look(self, step: int, lag: int, turn: int, turns: Turns, step_seconds: float | None) -> None:
        """Report the lag if it has grown too large.

        lag: iterations since the oldest checkpoint that waits for the store. turn: iterations in which all of the state
        is saved once. turns: has measured the store. step_seconds: seconds per iteration; None if unknown.
        """
        self._look_for_standstill(step - lag if lag else -1, time.monotonic())
        if lag <= turn:
            self._caveats.withdraw(KIND)
            if step > self._behind_at + _LONG * turn:
                self._said = 0
            return
        self._behind_at = step
        starting = turns.bandwidth is None and lag * (step_seconds or 0.0) < _STARTING
        if lag > TURNS * turn and lag >= 2 * self._said and not starting:
            self._said = lag
            self._caveats.say(KIND, self._text(lag, step, turn, turns, step_seconds))

    def _text(self, lag: int, step: int, turn: int, turns: Turns, step_seconds: float | None) -> str:
        text = (
            f"step {step}: the store is {counted(lag, 'iteration')} behind. "
            f"The whole state should be saved every {turn}. "
            "Newer copies are in memory only: lost if this host fails, unless another host has them."
        )
        if turns.bandwidth is None or turns.part_seconds is None:
            return f"{text} Nothing was measured yet: `scarctl daemon status` shows the pending copies."
        text += f" It takes {turns.bandwidth / 1e6:.3g} MB/s, and {turns.part_seconds:.3g} s for a part."
        if self._fixed is None:
            return f"{text} Use a faster store, or peers."
        needed = math.ceil(1.25 * turns.part_seconds / step_seconds) if step_seconds else 2 * self._fixed
        return f'{text} Set interval={max(needed, self._fixed + 1)} or more, or interval="auto".'

    def _look_for_standstill(self, oldest: int, now: float) -> None:
        """Warn once if the checkpoint of step `oldest` has waited for too long; -1: none waits."""
        if oldest < 0 or oldest != self._oldest:
            self._oldest, self._oldest_since = oldest, now
        elif now > self._oldest_since + _STUCK:
            self._oldest_since = math.inf  # warn only once
            log.warning(
                "copies of step %d have waited for the store for more than %d s: `scarctl daemon status` may show why",
                oldest,
                _STUCK,
            )
