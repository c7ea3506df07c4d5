"""Say how much of the state one checkpoint is to save, and what it did save."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from scarctl.state.version import step_of
from scarctl.util.arrays import Ids


class Extent(Enum):
    """How much of the state a checkpoint saves."""

    PART = "part"
    """What changed most, within the budget."""
    WHOLE = "whole"
    """All that differs from its last copy: the state is sealed."""
    WHOLE_UNLESS_BEHIND = "whole unless behind"
    """The same, or nothing while an earlier copy still waits for the store. Else that copy is overtaken, and a store
    that is always behind would never see a whole state."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What one checkpoint put into the arena."""

    version: int
    """Of all its copies. Taken once: the epoch changes when the daemon is replaced meanwhile."""
    ids: Ids
    sealed: bool
    """Every partition of the state is of this version: copied now, or equal to its newest copy."""
    nonfinite: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Partitions left out because their values are not finite: the last good copy is kept."""

    @property
    def step(self) -> int:
        return step_of(self.version)
