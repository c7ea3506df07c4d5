"""Choose the step after which all ranks continue, if they have resumed with states of different steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scarctl.recovery.label import NO_COMMIT
from scarctl.recovery.plan import Perturbation
from scarctl.state.label import Label
from scarctl.theory.rework import Outlook, Rework, rework_of_loss

MAX_APART = 1
"""Largest difference between the steps of two survivors of one failure, in iterations."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that one rank has found for its own part."""

    step: int
    """Step of its newest extras."""
    survived: bool
    """Whether its arena has the last iteration that it finished."""
    distance: float | None = None
    """Norm of its last known distances from these copies; None if they are unknown."""
    owns: bool = True
    """Whether it owns rows. A rank without rows does not count in the decision."""
    whole: str = ""
    """Name of the commit of the whole state that has all its copies and extras, of that step; "" without one."""
    head: int | None = None
    """The last iteration until which `distance` was measured. None: its newest."""

    def to_list(self) -> list[Any]:
        """Return the fields as a list, for `Team.gather`."""
        return [self.step, self.survived, self.distance, self.owns, self.whole, self.head]

    def unseen(self, step: int) -> int:
        """Return the iterations up to `step` after the last one that its arena knows, as of a replica that was cut
        off.
        """
        return 0 if self.head is None else max(0, step - self.head)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The decision for all ranks."""

    step: int
    """Iterations finished: all ranks continue with the next one."""
    reference: int
    """The rank with extras of `step`, which ranks without such extras take over."""
    lost: tuple[int, ...]
    """Ranks whose state is older than that of the survivors; () if all are equal."""
    label: Label
    """Whether the whole state is of `step`, as one commit of the whole state saved it."""


def agree_on_step(ranks: Sequence[RankState]) -> Agreement:
    """Return the step after which all ranks continue: the smallest step of the survivors.

    If no arena survived, ranks whose copies are all of one commit of the newest step count as survivors; without any,
    those with extras of the newest step. A rank whose state never changes saves no extras: its old ones must not set
    back others.

    Survivors that are more than one iteration behind the others (an arena that an earlier run left) count as lost.
    Newer copies of a survivor are kept, and make the state mixed.
    """
    owners = [rank for rank, standing in enumerate(ranks) if standing.owns] or list(range(len(ranks)))
    survivors = [rank for rank in owners if ranks[rank].survived]
    if not survivors:
        # Copies of survivors may have been saved to the store before their arenas were removed.
        head = max(ranks[rank].step for rank in owners)
        at_head = [rank for rank in owners if ranks[rank].step >= head - MAX_APART]
        survivors = [rank for rank in at_head if ranks[rank].whole and ranks[rank].step == head] or at_head
    newest = max((ranks[rank].step for rank in survivors), default=0)
    survivors = [rank for rank in survivors if ranks[rank].step >= newest - MAX_APART]
    # A rank that resumes at a survivor's step has lost nothing, even if its arena did not survive.
    steps = {ranks[rank].step for rank in survivors}
    survivors += [r for r in owners if r not in survivors and ranks[r].whole and ranks[r].step in steps]
    chosen = sorted(survivors)
    step = min(ranks[rank].step for rank in chosen)
    reference = next(rank for rank in chosen if ranks[rank].step == step)
    lost = tuple(rank for rank in owners if rank not in chosen)
    wholes = {ranks[rank].whole for rank in owners}
    of_one = len(wholes) == 1 and all(wholes) and all(standing.step == step for standing in ranks)
    return Agreement(step, reference, lost, Label(step, step, () if of_one else (NO_COMMIT,)))


def perturbation_of(ranks: Sequence[RankState], agreement: Agreement) -> Perturbation:
    """Return the estimated norm by which the state changes: the newest values of lost ranks are gone.

    It is unknown if one of them moved for longer after its distance was measured than before.
    """
    lost = [ranks[rank] for rank in agreement.lost]
    norm = _norm(lost)
    if norm is None or any(one.unseen(agreement.step) > _seen(one) for one in lost):
        return Perturbation(None, "unknown")
    return Perturbation(norm, "estimated" if lost else "measured")


def _norm(lost: Sequence[RankState]) -> float | None:
    known = [one.distance for one in lost if one.distance is not None]
    return None if len(known) < len(lost) else math.hypot(*known)


def _seen(lost: RankState) -> int:
    """Return the iterations for which a lost rank's distance from its copies was measured."""
    return 0 if lost.head is None else max(0, lost.head - lost.step)


def rework_of_ranks(
    ranks: Sequence[RankState], agreement: Agreement, outlook: Outlook, *, comparable: bool
) -> Rework:
    """Return the predicted rework of continuing, if all ranks own equal parts.

    comparable: distances are in the norm in which convergence is measured. Otherwise the ages of the copies are used.
    """
    owners = sum(standing.owns for standing in ranks)
    lost = [ranks[rank] for rank in agreement.lost]
    ages = [max(0, agreement.step - one.step) for one in lost]
    since = max((one.unseen(agreement.step) for one in lost), default=0)
    norm = _norm(lost) if comparable else None
    return rework_of_loss(outlook, norm, ages, len(ages) / max(1, owners), since=since)
