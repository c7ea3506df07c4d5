"""Define the report of a recovery: the executed plan, and the changes that it made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scarctl.recovery.plan import MEMORY, PEER, Perturbation, Plan, count_tiers
from scarctl.state.label import Label, Labelled

if TYPE_CHECKING:
    from scarctl.theory.rework import Cost


@dataclass(frozen=True, slots=True)
class Report(Labelled):
    """The result of a plan that was carried out."""

    plan: Plan = field(repr=False)
    """The plan with the tiers and versions that the copies actually came from."""
    perturbation: Perturbation
    seconds: float
    problems: tuple[str, ...] = ()
    """Descriptions of damaged copies, for display."""
    memory_fault: str = ""
    """Sentence that names copies in memory whose bytes had changed, and which were not used; "" without one."""
    output: str | None = None
    """Path of the written file."""
    cost: Cost | None = None
    """Predicted cost of the recovery; None if no prediction was requested."""
    saved_at: str | None = None
    """UTC time of the store's newest commit; None if no copy came from the store, or its records lack the time."""

    def from_peer(self) -> Report:
        """Return the report of a recovery whose copies in memory were brought from another host."""
        tier = np.where(self.plan.tier == MEMORY, np.int8(PEER), self.plan.tier)
        return replace(self, plan=replace(self.plan, tier=tier))

    def labelled(self, label: Label) -> Report:
        """Return the report with the label that all ranks know."""
        return replace(self, plan=replace(self.plan, label=label))

    @property
    def mode(self) -> str:
        return self.plan.mode

    @property
    def label(self) -> Label:
        return self.plan.label

    @property
    def degraded(self) -> bool:
        return self.plan.degraded

    @property
    def step(self) -> int | None:
        return self.plan.step

    @property
    def lost_partitions(self) -> int:
        return self.plan.lost

    @property
    def restored_partitions(self) -> int:
        return len(self.plan.ids)

    @property
    def bytes(self) -> int:
        return self.plan.nbytes

    @property
    def tiers(self) -> dict[str, int]:
        return count_tiers(self.plan.tier)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.plan.to_json(),
            "perturbation": self.perturbation.to_json(),
            "output": self.output,
            "seconds": round(self.seconds, 6),
            "problems": list(self.problems),
            "saved_at": self.saved_at,
            **(self.cost.to_json() if self.cost is not None else {}),
        }
