"""Define the result of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from scarctl.arena.slot import Slot
from scarctl.policy.turns import Turn
from scarctl.state.version import step_of
from scarctl.util.arrays import Ids


def _none() -> Ids:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Copied:
    """What one checkpoint has copied into a slot of the arena, which is not current yet, and what the store gets."""

    version: int
    """Version of the state. Fixed at the start: the epoch may change meanwhile, if the daemon is replaced."""
    slot: Slot | None = None
    """The slot; None if it is held by a saver, so that this checkpoint is left out."""
    moment: int = 0
    ids: Ids = field(default_factory=_none)
    """Partitions that have changed since the newest checkpoint."""
    sealed: bool = False
    """The slot has all of the state. Otherwise it never becomes current."""
    nonfinite: Ids = field(default_factory=_none)
    """Partitions whose values are not finite."""
    turn: Turn = Turn.NOTHING
    """What the store gets."""
    exact: Ids = field(default_factory=_none)
    """In a partial turn, the partitions that the store gets exactly,"""
    encoded: Ids = field(default_factory=_none)
    """and those that it gets encoded."""
    seconds: float = 0.0
    """Processor seconds of the thread that copied."""
    aside: bool = True
    """It was not the training thread, which would have waited for all of it."""
    common: Mapping[str, str] | None = None
    """If sealed: see `scarctl.state.extras.Notes.common`. None: not read yet."""

    @property
    def step(self) -> int:
        return step_of(self.version)
