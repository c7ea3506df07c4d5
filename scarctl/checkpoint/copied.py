"""Define the result of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scarctl.arena.staged import Staged
from scarctl.policy.turns import Turn
from scarctl.state.encodings import Encoding
from scarctl.state.version import step_of
from scarctl.util.arrays import Ids


@dataclass(frozen=True, slots=True)
class Part:
    """Copies that the store gets of a checkpoint, in one encoding."""

    ids: Ids
    """Partitions, ascending."""
    encoding: Encoding
    staged: Staged | None
    """Their rows; None: those in the arena, which nothing changes until the store has them."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The copies that one checkpoint made in the arena, and what the store gets of them."""

    version: int
    """Version of all copies. Fixed at the start: the epoch may change meanwhile, if the daemon is replaced."""
    ids: Ids
    sealed: bool
    """Every partition of the state is of this version: just copied, or equal to its newest copy."""
    nonfinite: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Partitions left out because their values are not finite: the last good copy is kept."""
    turn: Turn = Turn.NOTHING
    """What the store gets."""
    parts: Sequence[Part] = ()
    """These copies. Empty, with another turn than NOTHING: it lacks nothing, and only gets the extras."""
    seconds: float = 0.0
    """Processor seconds of the thread that copied."""
    aside: bool = True
    """It was not the training thread, which would have waited for all of it."""
    common: Mapping[str, str] | None = None
    """If sealed: see `scarctl.state.extras.Notes.common`. None: not read yet."""

    @property
    def step(self) -> int:
        return step_of(self.version)

    def discard(self) -> None:
        """Delete the staged rows: they are not handed over."""
        for part in self.parts:
            if part.staged is not None:
                part.staged.discard()
