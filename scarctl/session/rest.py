"""Compare the live state with its copies, where no hook reports when a step begins."""

from __future__ import annotations

import logging

from scarctl.checkpoint.engine import Engine
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
        return bool(engine.arena.intact().all()) and self._changed(engine) is False

    def changed_outside(self) -> bool:
        """Return whether the state has changed since the newest block ended. False if that is unknown.

        It is known if the state was saved as a whole after that block.
        """
        engine = self._opening.engine
        if engine is None or not self._gate.blocks or self._gate.torn or not engine.is_sealed():
            return False
        return bool(self._changed(engine))

    def _changed(self, engine: Engine) -> bool | None:
        """Return whether a partition differs from its copy; None if that cannot be found."""
        try:
            live = self._binding.live(engine.arena)
        except Exception as error:  # saving meets the same error, and reports it
            log.debug("the state cannot be compared with its copies: %s", error)
            return None
        return bool((live.changed() & engine.arena.intact()).any())
