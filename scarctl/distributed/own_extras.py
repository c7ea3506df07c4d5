"""Mix the extras of several ranks: some objects are equal on all ranks, others belong to one rank.

The states of random generators belong to one rank, and so do the user's extras with `per_rank=True`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scarctl.errors import Corruption
from scarctl.state.extras import Extras


@dataclass(frozen=True, slots=True)
class Own:
    """Extras of an adapter that may train on several ranks, as far as they may be one rank's own."""

    rng: Any
    """States of the random generators; None if they could not be read."""
    objects: Mapping[str, Any]
    """States of the user's objects, by name."""

    @classmethod
    def of(cls, state: Any) -> Own:
        """Read `Extras.state`. Raises Corruption."""
        if not isinstance(state, dict) or "rng" not in state or not isinstance(state.get("extras"), dict):
            raise Corruption(
                "extras: random generators and objects are missing: no rank has stored these extras"
            )
        return cls(state["rng"], state["extras"])


NOTHING = Own(None, {})
"""Extras of a rank that saved no extras."""


def with_own(extras: Extras, own: Own, names: Collection[str]) -> Extras:
    """Return another rank's `extras` with the random generators of `own`, and with its objects listed in `names`.

    names: names of the objects that belong to one rank. If `own` lacks one, it is left out.
    """
    theirs = Own.of(extras.state).objects
    shared = {name: value for name, value in theirs.items() if name not in names}
    mine = {name: own.objects[name] for name in names if name in own.objects}
    return replace(extras, state={**extras.state, "rng": own.rng, "extras": {**shared, **mine}})


def completed(extras: Extras, now: Own, names: Collection[str]) -> Extras:
    """Return a rank's `extras`, with objects of that rank that they lack taken from `now`.

    names: names of the objects that belong to one rank.
    """
    own = Own.of(extras.state)
    missing = {name: now.objects[name] for name in names if name not in own.objects}
    rng = now.rng if own.rng is None else own.rng
    return replace(extras, state={**extras.state, "rng": rng, "extras": {**own.objects, **missing}})
