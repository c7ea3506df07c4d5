"""Names for commits of the whole state: the same on all ranks at the same moment, and never for two contents.

A step does not tell what the state was: weights may be replaced without a step, and saved again. So a name is made of
what all ranks in lockstep know unasked: the start of the job, how often the state was recovered since, the step, and
how often parameters were written to after it. Not every write is counted. A process that comes to the same name with
another state takes a random one, which nobody else has.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import Protocol


class Lockstep(Protocol):
    """What is the same in all processes that train together."""

    @property
    def start(self) -> str:
        """Names this start of the job, once the store is open: 32 hex digits."""

    def writes(self) -> int:
        """How often parameters were written to in place, as far as that is counted."""


class Identities:
    """The names that one session gives."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._turns = 0
        self._at: tuple[int, int] | None = None
        """The newest step, and the writes by its end."""
        self._given: set[str] = set()

    def turn(self) -> None:
        """The state has changed by no step, on all ranks: a recovery."""
        self._turns += 1
        self._at = None

    def stepped(self, step: int) -> None:
        """`step` has ended; called at its end, and perhaps again later."""
        if self._at is None or self._at[0] != step:
            self._at = step, self._lockstep.writes()
            self._given.clear()

    def of(self, step: int, there: str, *, changed: bool) -> str:
        """The name of the whole state as it is now, after `step`.

        there: the name of what the arena had before; changed: something has been copied there since.
        """
        self.stepped(step)
        assert self._at is not None
        written = self._lockstep.writes() - self._at[1]
        text = f"{self._lockstep.start}/{self._turns}/{step}/{written}"
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        if name in self._given and (changed or there != name):
            name = uuid.uuid4().hex
        self._given.add(name)
        return name
