"""Compare the live state with its copies, where no hook reports when a step begins."""

from __future__ import annotations

import logging

from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.weights import Weights
from scarctl.session.parts import Parts

log = logging.getLogger("scarctl")


class Rest:
    """Finds whether one session's state has changed since it was saved. Use it with the gate held, and without a copy
    under way.
    """

    def __init__(self, parts: Parts) -> None:
        """Use the session's parts."""
        self._gate = parts.gate
        self._opening = parts.opening
        self._binding = parts.binding

    def unchanged(self) -> bool:
        """Return whether the state equals its copies in memory, which are sealed, or those of a resume.

        A step may be running that changes the state later.
        """
        engine = self._opening.engine
        if engine is None or not (engine.filling.since == engine.arena.head_step or engine.is_sealed()):
            return False
        live = self._live(engine)
        return live is not None and bool(engine.arena.intact().all()) and not live.changed().any()

    def changed_outside(self, weights: Weights) -> bool:
        """Return whether the state has changed since the newest block ended. False if that is unknown.

        It is known if the state was saved as a whole after that block. Otherwise only a few values are compared.

        weights: those values.
        """
        engine = self._opening.engine
        if engine is None or not self._gate.blocks or self._gate.torn:
            return False
        live = self._live(engine)
        if live is None:
            return False
        differs = engine.is_sealed() and bool((live.changed() & engine.arena.intact()).any())
        return differs or weights.replaced(live)

    def _live(self, engine: Engine) -> LiveState | None:
        """Return the present state; None if it cannot be found."""
        try:
            return self._binding.live(engine.arena)
        except Exception as error:  # saving meets the same error, and reports it
            log.debug("the state cannot be compared with its copies: %s", error)
            return None
