"""Encode the requests of commands to a running session: save or flush now, or recover a part of the state."""

from __future__ import annotations

from dataclasses import dataclass

from scarctl.config.checks import LONGEST_NOTICE
from scarctl.errors import UsageError
from scarctl.util.document import Document

KINDS = ("partial", "full", "recover", "flush")
MAX_SECONDS = LONGEST_NOTICE
MAX_LOST = 1024
"""Most parts that one request can name."""


@dataclass(frozen=True, slots=True)
class Request(Document):
    """A request that the daemon passes on to a session. `number` identifies its answer."""

    kind: str
    """"partial", "full": a checkpoint; "recover": the parts `lost`, from their newest copies; "flush": bring the newest
    step into memory, because the host shuts down in `seconds`."""
    number: int = 0
    lost: tuple[str, ...] = ()
    max_rework: float | None = None
    """Most predicted rework of the recovery, in iterations."""
    seconds: float | None = None

    @classmethod
    def from_json(cls, obj: object) -> Request:
        """Read the values of `to_json`. Raises UsageError for anything else."""
        if not isinstance(obj, dict):
            raise UsageError("a request is an object")
        kind, number, lost = obj.get("kind"), obj.get("number", 0), obj.get("lost", [])
        if kind not in KINDS or type(number) is not int:
            raise UsageError("there is no such request")
        if not isinstance(lost, list) or len(lost) > MAX_LOST or not all(type(part) is str for part in lost):
            raise UsageError(f"the lost parts are a list of at most {MAX_LOST} texts")
        if (kind == "recover") != bool(lost):
            raise UsageError("a recovery names the lost parts")
        most = obj.get("max_rework")
        if most is not None and not (type(most) in (int, float) and most >= 0):
            raise UsageError("the limit of rework is a number of at least 0")
        seconds = obj.get("seconds")
        if seconds is not None and not (type(seconds) in (int, float) and 0 <= seconds <= MAX_SECONDS):
            raise UsageError("the time to flush is a number of seconds")
        return cls(kind, number, tuple(lost), most, seconds)
