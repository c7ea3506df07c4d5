"""Mix the extras of several ranks: some objects are the same on all of them, others are each rank's own.

Random numbers are each rank's own, and so are the objects that the user passed as extras with `per_rank=True`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scarctl.errors import Corruption
from scarctl.state.extras import Extras


@dataclass(frozen=True, slots=True)
class Early:
    """Early extras of an adapter that may train on several ranks."""

    rng: Any
    """States of the random number generators; None where nobody could read this rank's."""
    objects: Mapping[str, Any]
    """States of the user's objects, by name."""

    @classmethod
    def of(cls, early: Any) -> Early:
        """Read `Extras.early`. Raises Corruption."""
        if not isinstance(early, dict) or "rng" not in early or not isinstance(early.get("extras"), dict):
            raise Corruption("extras: no rank stored random numbers and objects in them")
        return cls(early["rng"], early["extras"])


NOTHING = Early(None, {})
"""Of a rank of which nothing was saved."""


def with_own(extras: Extras, own: Early, names: Collection[str]) -> Extras:
    """Return another rank's `extras` with `own` random numbers, and with those of `own` objects that are in `names`.

    names: of the objects that are each rank's own. One that `own` lacks is left out.
    """
    theirs = Early.of(extras.early).objects
    shared = {name: value for name, value in theirs.items() if name not in names}
    mine = {name: own.objects[name] for name in names if name in own.objects}
    return replace(extras, early={**extras.early, "rng": own.rng, "extras": {**shared, **mine}})


def completed(extras: Extras, now: Early, names: Collection[str]) -> Extras:
    """Return a rank's `extras`; what of its own they lack is as it is now.

    names: of the objects that are each rank's own.
    """
    early = Early.of(extras.early)
    missing = {name: now.objects[name] for name in names if name not in early.objects}
    rng = now.rng if early.rng is None else early.rng
    return replace(extras, early={**extras.early, "rng": rng, "extras": {**early.objects, **missing}})
