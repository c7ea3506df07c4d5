"""From which step all ranks go on, when they have come back with states of different steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scarctl.recovery.plan import Perturbation
from scarctl.theory.rework import Outlook, Rework, rework_of_loss

MAX_APART = 1
"""Survivors of one failure have finished the same iteration, or one of them one more."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What one rank found of its own part."""

    step: int
    """Of its newest extras."""
    exact: bool
    """All its copies are of that step, and of one commit of the whole state."""
    survived: bool
    """Its memory has the last iteration that it finished."""
    distance: float | None = None
    """Norm of how far its values were from these copies when that was last known; None when it never was."""
    owns: bool = True
    """It has some of the state: one that has nothing decides nothing."""
    whole: str = ""
    """The commit of the whole state that its copies and extras are of, "" when they are of none."""

    def to_list(self) -> list[Any]:
        """For `Team.gather`."""
        return [self.step, self.exact, self.survived, self.distance, self.owns, self.whole]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks do."""

    step: int
    """Iterations finished: all go on with the next one."""
    reference: int
    """The rank whose extras of `step` are good for those that have none."""
    lost: tuple[int, ...]
    """Ranks whose state is older than that of the survivors; () when all are alike."""
    exact: bool
    """The whole state is of `step`, as one commit of it has saved it."""


def agree_on_step(ranks: Sequence[Standing]) -> Agreement:
    """The step to go on after: the smallest of the survivors', or of all when nobody has survived.

    Without memory, those count as survivors that have all of the newest step.

    Survivors that are more than one iteration behind the others (an arena that an earlier run left) count as lost. What
    a survivor has beyond the step is kept, and makes the state inexact.
    """
    owners = [rank for rank, standing in enumerate(ranks) if standing.owns] or list(range(len(ranks)))
    survivors = [rank for rank in owners if ranks[rank].survived]
    if not survivors:
        # What survived may have come to the store before its memory was given up.
        head = max(ranks[rank].step for rank in owners)
        survivors = [rank for rank in owners if ranks[rank].exact and ranks[rank].step == head]
    newest = max((ranks[rank].step for rank in survivors), default=0)
    survivors = [rank for rank in survivors if ranks[rank].step >= newest - MAX_APART]
    # Whoever comes back exactly where the survivors are has lost nothing, whatever its memory says.
    at_head = {ranks[rank].step for rank in survivors}
    survivors += [r for r in owners if r not in survivors and ranks[r].exact and ranks[r].step in at_head]
    chosen = sorted(survivors) or owners
    step = min(ranks[rank].step for rank in chosen)
    reference = next(rank for rank in chosen if ranks[rank].step == step)
    lost = tuple(rank for rank in owners if rank not in chosen)
    one = len({ranks[rank].whole for rank in owners}) == 1
    exact = one and all(standing.exact and standing.step == step for standing in ranks)
    return Agreement(step, reference, lost, exact)


def perturbation_of(ranks: Sequence[Standing], agreement: Agreement) -> Perturbation:
    """What going on changes in the state, estimated: the values of lost ranks are gone."""
    distances = [ranks[rank].distance for rank in agreement.lost]
    known = [distance for distance in distances if distance is not None]
    if len(known) < len(distances):
        return Perturbation(None, "unknown")
    return Perturbation(math.hypot(*known), "estimated" if known else "measured")


def rework_of_ranks(
    ranks: Sequence[Standing], agreement: Agreement, outlook: Outlook, *, comparable: bool
) -> Rework:
    """What going on is predicted to cost, where ranks own equal parts.

    comparable: distances are in the norm that convergence is told in; else the copies' ages count.
    """
    owners = sum(standing.owns for standing in ranks)
    ages = [agreement.step - ranks[rank].step for rank in agreement.lost]
    norm = perturbation_of(ranks, agreement).value if comparable else None
    return rework_of_loss(outlook, norm, [max(0, age) for age in ages], len(ages) / max(1, owners))
