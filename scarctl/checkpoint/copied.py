"""Define the extent of a checkpoint, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from scarctl.state.version import step_of
from scarctl.util.arrays import Ids


class Extent(Enum):
    """Extent of a checkpoint."""

    PART = "part"
    """The partitions that the policy selects, within the budget."""
    WHOLE = "whole"
    """All partitions that differ from their last copy: the state is sealed."""
    WHOLE_UNLESS_BEHIND = "whole unless behind"
    """As WHOLE, but copies nothing while an earlier copy is pending. Newer copies would replace pending ones, and a
    slow store would never get a whole state."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The copies that one checkpoint made in the arena."""

    version: int
    """Version of all copies. Fixed at the start: the epoch may change meanwhile, if the daemon is replaced."""
    ids: Ids
    sealed: bool
    """Every partition of the state is of this version: just copied, or equal to its newest copy."""
    nonfinite: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Partitions left out because their values are not finite: the last good copy is kept."""
    exact: Ids | None = None
    """The partitions of `ids` that the store keeps exactly, and perhaps others; None: all."""
    missed: bool = False
    """Nothing was copied although finite partitions have changed: all of them are protected, or exceed the budget."""
    common: Mapping[str, str] | None = None
    """If sealed: see `scarctl.state.extras.Notes.common`. None: not read yet."""

    @property
    def step(self) -> int:
        return step_of(self.version)
