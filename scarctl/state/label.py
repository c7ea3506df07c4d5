"""Label a state: consistent or mixed, of which steps, and whether the position in the data was declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Label:
    """What is known of a saved or restored state."""

    consistent: bool
    """Everything that was given to `attach` is of one step, bit for bit. Otherwise the state is mixed."""
    first: int
    """Step of the oldest partition."""
    last: int
    """Step of the newest partition."""
    declared: bool = False
    """The loop had declared the end of the step, so that its position in the data was saved."""
    reasons: tuple[str, ...] = ()
    """Why the state is mixed, one sentence each; () if it is consistent."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of JSON and of the journal."""
        return {
            "consistent": self.consistent,
            "first_step": self.first,
            "last_step": self.last,
            "position": "declared" if self.declared else "unknown",
        }

    def __str__(self) -> str:
        """Return "consistent", or "mixed, partitions of steps 12 to 20" or why, and whether the position is unknown."""
        if self.consistent:
            label = "consistent"
        elif self.first != self.last:
            label = f"mixed, partitions of steps {self.first} to {self.last}"
        else:
            label = f"mixed: {'; '.join(self.reasons)}"
        return label if self.declared else f"{label}; the position in the data is unknown"
