"""Record the caveats of a run: log each one once, and keep it with every checkpoint.

A caveat names a part of the run that is not protected, or that cannot be repeated. The code that finds one calls
`Caveats.say`; `scarctl inspect` reads it back from the extras.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from scarctl.util.document import Document

log = logging.getLogger("scarctl")

_MOST = 100
"""Limit on caveats read back, and on characters of a kind (ten times as many of a message). Extras may be hostile."""


@dataclass(frozen=True, slots=True)
class Caveat(Document):
    """One guarantee that does not hold."""

    kind: str
    """Short and stable, such as "generator-moved"."""
    message: str
    """A sentence for users: the limit, and how to avoid it."""


class Caveats:
    """The caveats of one session, at most one of each kind."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Caveat] = {}
        self._logged: set[str] = set()
        """Kinds that were logged."""

    def say(self, kind: str, message: str, *, once: bool = False) -> None:
        """Keep a caveat in place of an older one of its kind, and log it at WARNING unless it is unchanged.

        once: do not log another of this kind, because it may recur with every step.
        """
        caveat = Caveat(kind, message)
        if self._by_kind.get(kind) != caveat:
            self._by_kind[kind] = caveat
            if not (once and kind in self._logged):
                log.warning("%s", message)
            self._logged.add(kind)

    def withdraw(self, *kinds: str) -> None:
        """Drop the caveats of these kinds, because their causes are gone."""
        if self._by_kind:
            for kind in kinds:
                self._by_kind.pop(kind, None)

    def __iter__(self) -> Iterator[Caveat]:
        return iter(tuple(self._by_kind.values()))


def read_caveats(stored: object) -> tuple[Caveat, ...]:
    """Read a list of the values of `Caveat.to_json`. The input may be hostile: an entry that is not a caveat is
    skipped.
    """
    caveats = []
    for entry in stored[:_MOST] if isinstance(stored, list) else ():
        if not isinstance(entry, dict):
            continue
        kind, message = entry.get("kind"), entry.get("message")
        if isinstance(kind, str) and isinstance(message, str):
            caveats.append(Caveat(kind[:_MOST], message[: 10 * _MOST]))
    return tuple(caveats)
