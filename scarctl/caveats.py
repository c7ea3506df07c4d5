"""What a run may not rely on, said once in the log and kept with every checkpoint.

A caveat says that something of the run is not protected, or that resuming from what is saved is not exact. The code
that finds it calls `Caveats.say`; `Session.resume` and `scarctl inspect` read it back from the extras.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("scarctl")

FIELD = "caveats"
"""Of a checkpoint's extras."""
_MOST = 100
"""Caveats that are read back, and characters of a kind; a message may have ten times as many. Extras may be hostile."""


@dataclass(frozen=True, slots=True)
class Caveat:
    """One thing that does not hold."""

    kind: str
    """Short and stable, such as "generator-moved"."""
    message: str
    """What does not hold, and what to do about it, for people."""
    inexact: bool = True
    """A run that resumes from a state saved meanwhile may end otherwise than one that was never stopped."""

    def to_json(self) -> dict[str, Any]:
        """Fields of documents and of extras."""
        return {"kind": self.kind, "message": self.message, "inexact": self.inexact}


class Caveats:
    """Those of one session."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Caveat] = {}

    def say(self, kind: str, message: str, *, inexact: bool = True) -> None:
        """Log at WARNING, unless this text was logged before, and keep it. A newer one of a kind replaces the older.

        inexact: resuming from a checkpoint that is saved from now on is not exact.
        """
        caveat = Caveat(kind, message, inexact)
        if self._by_kind.get(kind) != caveat:
            self._by_kind[kind] = caveat
            log.warning("%s", message)

    def keep(self, kind: str, message: str) -> None:
        """Keep a caveat that makes resuming inexact, and is logged elsewhere."""
        self._by_kind[kind] = Caveat(kind, message)

    def withdraw(self, kind: str) -> None:
        """Drop the caveat of this kind: what it says is mended."""
        self._by_kind.pop(kind, None)

    def __iter__(self) -> Iterator[Caveat]:
        return iter(tuple(self._by_kind.values()))

    def to_extras(self) -> dict[str, Any]:
        """One more field of extras, which `caveats_of` reads; nothing when there are none."""
        found = [caveat.to_json() for caveat in self]
        return {FIELD: found} if found else {}


def caveats_of(extras: Any) -> tuple[Caveat, ...]:
    """Those that a session saved with these extras. Takes hostile input: what is none is skipped."""
    found = extras.get(FIELD) if isinstance(extras, dict) else None
    caveats = []
    for entry in found[:_MOST] if isinstance(found, list) else ():
        if not isinstance(entry, dict):
            continue
        kind, message, inexact = (entry.get(name) for name in ("kind", "message", "inexact"))
        if isinstance(kind, str) and isinstance(message, str):
            caveats.append(Caveat(kind[:_MOST], message[: 10 * _MOST], inexact is not False))
    return tuple(caveats)


def reasons(caveats: Iterable[Caveat]) -> tuple[str, ...]:
    """Why a state with these caveats is not exact; () when none of them says so."""
    return tuple(caveat.message for caveat in caveats if caveat.inexact)
