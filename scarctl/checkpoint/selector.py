"""Select the partitions of a partial checkpoint for a session without other ranks."""

from __future__ import annotations

from scarctl.policy.select import select
from scarctl.policy.turns import Turn

LAG = 2
"""Regular checkpoints between what a rank reports and what all ranks agree on."""


class Selector:
    """Selects the partitions of a partial checkpoint: here for one session; a subclass selects for all ranks together.

    Other ranks may wait for this rank's part in a regular checkpoint. So the caller announces it by `expect`, and
    reports its end by `settle`. All calls but `select` and `read_sample` come from the training thread.
    """

    shared = False
    """Whether all ranks save at the same steps, and one rank may use any part of the common budget."""
    request = 0
    """A number that this process announces to all others; the largest wins. 0: none."""
    proposed = 0
    """Iterations between regular checkpoints that this process proposes; the largest of all ranks wins."""
    wants = Turn.NOTHING
    """What this process's store is ready to get; the least of all ranks counts."""
    turn = Turn.NOTHING
    """What all ranks' stores were ready to get, as `agreed` has received it."""
    interval = 0
    """The interval that `agreed` has received; 0: no new one."""
    differs = False
    """Whether processes were found to hold different values of what they should have in common."""

    @property
    def expecting(self) -> bool:
        """Whether an expected checkpoint is not settled."""
        return False

    def agreed(self) -> int:
        """Return the largest `request` of a round some checkpoints ago. Call it once before each `expect`."""
        return 0

    def expect(self, step: int, budget: int) -> None:
        """Announce that a regular checkpoint of `step` is due, on all ranks. budget: bytes that this rank may save."""

    def hurry(self) -> None:
        """Note that the training thread has begun to wait for the copy."""

    def settle(self) -> None:
        """Note that the copy has ended, or that nothing was copied."""

    def read_sample(self) -> None:
        """Compare what processes have in common, in a checkpoint that selects nothing. Called as `select` is."""

    select = staticmethod(select)

    def close(self) -> None:
        """End this process's part, after the last copy has ended."""
