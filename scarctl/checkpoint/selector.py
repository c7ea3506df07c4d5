"""Define the selector of partitions for partial checkpoints, and the one of a session without other ranks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.policy.select import Selection, select
from scarctl.util.arrays import Ids


class Selector(Protocol):
    """Selects the partitions of a partial checkpoint: for one session, or for all ranks together.

    Other ranks may wait for this rank's part in a regular checkpoint. So the caller announces it by `expect`, and
    reports its end by `settle`.
    """

    shared: bool
    """Whether all ranks save at the same steps, and one rank may use any part of the common budget."""
    wish: int
    """A number that this process announces to all others; 0: none."""
    proposed: int
    """Iterations between regular checkpoints that this process proposes; the largest of all ranks wins."""
    interval: int
    """The interval that `agreed` has received; 0: no new one."""

    @property
    def expecting(self) -> bool:
        """Whether an expected checkpoint is not settled."""

    def agreed(self) -> int:
        """Return the largest `wish` of a round some checkpoints ago. Call it once before each `expect`."""

    def expect(self, step: int, budget: int) -> None:
        """Announce that a regular checkpoint of `step` is due. budget: bytes."""

    def hurry(self) -> None:
        """Note that the training thread has begun to wait for the copy. Called in that thread."""

    def settle(self) -> None:
        """Note that the copy has ended, or that nothing was copied."""

    def select(
        self,
        policy: str,
        *,
        distance_sq: NDArray[np.float64],
        nbytes: Ids,
        staleness: Ids,
        eligible: NDArray[np.bool_],
        budget: int,
        credit: int = 0,
        cursor: int = 0,
        seed: int = 0,
        step: int = 0,
        max_staleness: int | None = None,
    ) -> Selection:
        """See `policy.select`. Called in the worker thread."""

    def close(self) -> None:
        """End this process's part. Called in the training thread, after the last copy has ended."""


class OwnSelector:
    """Selects for a session without other ranks, by `policy.select`."""

    shared = expecting = False
    wish = proposed = interval = 0

    def agreed(self) -> int:
        """See `Selector`."""
        return 0

    def expect(self, step: int, budget: int) -> None:
        """See `Selector`."""

    def hurry(self) -> None:
        """See `Selector`."""

    def settle(self) -> None:
        """See `Selector`."""

    def close(self) -> None:
        """See `Selector`."""

    select = staticmethod(select)
