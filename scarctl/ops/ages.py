"""Compute the ages of saved copies: by the clock, and in iterations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.view import ArenaView
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.store.saved import last_saved, seconds_since


@dataclass(frozen=True, slots=True)
class Age:
    """The time at which a state was saved, and whether ages in iterations are exact."""

    saved_at: str | None
    """UTC time of the newest commit in ISO 8601; None if no record has it."""
    is_lower_bound: bool
    """The run may be further than the newest known step, so every age may be larger."""
    finished: bool = False
    """The run was closed properly after the newest step."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a document."""
        seconds = seconds_since(self.saved_at)
        return {
            "saved_at": self.saved_at,
            "saved_seconds_ago": None if seconds is None else round(seconds, 3),
            "age_is_lower_bound": self.is_lower_bound,
        }


def age_of(store: Store, shards: Iterable[int], arenas: Iterable[ArenaView | None]) -> Age:
    """Return the age of the newest copies in `shards`.

    arenas: one for every process that saves to these shards; None if its arena is not on this host.

    Raises Unavailable, AccessDenied.
    """
    alive = [arena is not None and arena.alive for arena in arenas]
    return Age(last_saved(store, shards), not alive or not all(alive))


def lag_of(arena: ArenaView) -> int:
    """Return the iterations since the oldest of the store's copies that memory has newer; 0 if all are durable."""
    # A seal has found all durable copies unchanged.
    stored = np.maximum(arena.durable, arena.sealed)[waiting_in(arena)]
    return max(arena.head_step - max(int(step_of(stored).min()), 0), 0) if len(stored) else 0


def memory_age_of(arena: ArenaView) -> int | None:
    """Return the iterations since the oldest copy in memory; None if a partition has no copy there."""
    newest = arena.newest
    if not len(newest) or (newest < 0).any():
        return None
    return max(arena.head_step - int(step_of(newest).min()), 0)


def waiting_in(arena: ArenaView) -> NDArray[np.bool_]:
    """Return whether each partition's copy in memory is newer than the store's."""
    found: NDArray[np.bool_] = (arena.moments != arena.saved) & (arena.moments > 0)
    return found


def since_of(arena: ArenaView, step: int) -> int:
    """Return the iterations from the arena's newest checkpoint, when distances were measured, to `step`."""
    newest = int(arena.newest.max(initial=-1))
    return max(0, step - int(step_of(newest))) if newest >= 0 else 0
