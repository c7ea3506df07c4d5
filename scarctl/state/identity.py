"""Name commits of the whole state: ranks in lockstep choose the same name, and different contents never share one.

The step does not identify a state: weights may be replaced without a step and saved again. So a name is a hash of facts
that all ranks know without communicating: the start of the job, the recoveries since, the step, the writes to
parameters after it, and the number of whole commits since then. Not every write is counted. If a process
reaches a used name with another state, it takes a random name instead, which no other rank shares.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol


class Lockstep(Protocol):
    """Facts that are equal in all processes that train together."""

    @property
    def start(self) -> str:
        """Identity of this start of the job, known once the store is open: 32 hex digits."""

    @property
    def several(self) -> bool:
        """Whether other processes train with this one, each with its own extras."""

    def writes(self) -> int:
        """Return the number of counted in-place writes to parameters."""

    def common(self) -> Callable[[], Mapping[str, str]]:
        """Return a function that digests what this process has in common with others, for `Notes.common`.

        It reads the present values when it is called, in any thread.
        """


class Identities:
    """The names that one session gives to commits."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._several = lockstep.several
        self._turns = 0
        self._at: tuple[int, int] | None = None
        """The newest step, and the number of writes to parameters at its end."""
        self._given: dict[str, bytes] = {}
        """The names given after the newest step, with the digests of the extras."""
        self._unused: set[str] = set()
        """Those of them that no state of this process has. Other ranks may have saved a state with such a name."""
        self._tried: tuple[str, bytes] | None = None
        """The name of a commit that is being made, with the digest of its extras."""
        self._commits = 0
        """Whole commits made after the newest step."""
        self._newest: tuple[str, bytes] | None = None
        """The newest name, and the digest of its extras."""

    def turn(self) -> None:
        """Note that a recovery changed the state, on all ranks and without a step."""
        self._turns += 1
        self._at = None

    def stepped(self, step: int) -> None:
        """Note that `step` has ended. Repeated calls for one step have no effect."""
        if self._at is None or self._at[0] != step:
            self._at = step, self._lockstep.writes() if self._several else 0
            self._given.clear()
            self._unused.clear()
            self._commits, self._newest, self._tried = 0, None, None

    def of(self, step: int, there: str, *, changed: bool, extras: Callable[[], bytes]) -> str:
        """Return the name for a commit of the current whole state, after `step`: 32 hex digits.

        Call `made` or `failed` next: a commit that one rank has to repeat is one commit.

        there: name of the arena's previous state. changed: whether the arena has received copies since then.
        extras: returns a digest of the process's extras. A process alone saves copies and extras in one record, so
        its states with equal copies cannot be mixed.
        """
        self.stepped(step)
        assert self._at is not None
        written = self._lockstep.writes() - self._at[1]
        text, digest = f"{self._lockstep.start}/{self._turns}/{step}/{written}", b""
        if self._lockstep.several:
            digest = extras()
            if not changed and self._newest == (there, digest):
                self._tried = self._newest
                return there
            text += f"/{self._commits}"
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        if name in self._given:
            again = name in self._unused or not (changed or there != name)
            name = name if again and self._given[name] == digest else uuid.uuid4().hex
        self._given[name] = digest
        self._unused.discard(name)
        self._tried = name, digest
        return name

    def made(self) -> None:
        """Count the commit that `of` has named."""
        if self._tried is not None:
            self._commits, self._newest, self._tried = self._commits + 1, self._tried, None

    def failed(self, there: str) -> None:
        """Note that the commit that `of` has named, if any, was not made. there: name of the arena's state now."""
        tried, self._tried = self._tried, None
        if tried is not None and tried != self._newest and there != tried[0]:
            self._unused.add(tried[0])
