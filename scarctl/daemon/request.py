"""Encode what a command asks of a running session: to save now, or to recover a part of its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scarctl.errors import UsageError

KINDS = ("partial", "full", "recover")
MAX_LOST = 1024
"""Parts that can be named at once."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Asked for through the daemon. `number` is what the answer is kept under."""

    kind: str
    """"partial", "full": a checkpoint; "recover": the parts `lost`, from their newest copies."""
    number: int = 0
    lost: tuple[str, ...] = ()
    max_rework: float | None = None
    """Iterations that the recovery may cost."""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "number": self.number,
            "lost": list(self.lost),
            "max_rework": self.max_rework,
        }

    @classmethod
    def from_json(cls, obj: object) -> Wish:
        """Read what `to_json` wrote. Raises UsageError for anything else."""
        if not isinstance(obj, dict):
            raise UsageError("a wish is an object")
        kind, number, lost = obj.get("kind"), obj.get("number", 0), obj.get("lost", [])
        if kind not in KINDS or type(number) is not int:
            raise UsageError("there is no such wish")
        if not isinstance(lost, list) or len(lost) > MAX_LOST or not all(type(part) is str for part in lost):
            raise UsageError(f"what is lost is a list of at most {MAX_LOST} texts")
        if (kind == "recover") != bool(lost):
            raise UsageError("to recover is to name what is lost")
        most = obj.get("max_rework")
        if most is not None and not (type(most) in (int, float) and most >= 0):
            raise UsageError("what a recovery may cost is a number from 0 on")
        return cls(kind, number, tuple(lost), most)
