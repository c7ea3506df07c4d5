"""How old what is saved is: in iterations, as far as the run's newest step is known, and by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scarctl.store.saved import describe, last_saved, seconds_since

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scarctl.daemon.peek import ArenaView
    from scarctl.store import Store


@dataclass(frozen=True, slots=True)
class Age:
    """What is known of a store's age beside the steps of its copies."""

    saved_at: str | None
    """UTC time of the newest commit; None when no record says it."""
    is_lower_bound: bool
    """The run may have been further than the newest step that is known, so every age may be larger."""

    def to_json(self) -> dict[str, Any]:
        """Fields of a document."""
        seconds = seconds_since(self.saved_at)
        return {
            "saved_at": self.saved_at,
            "saved_seconds_ago": None if seconds is None else round(seconds, 3),
            "age_is_lower_bound": self.is_lower_bound,
        }

    def __str__(self) -> str:
        return describe(self.saved_at)

    def at_least(self, number: object) -> str:
        """An age, or the newest step, for people."""
        return f"at least {number}" if self.is_lower_bound else str(number)


def age_of(store: Store, shards: Iterable[int], arenas: Iterable[ArenaView | None]) -> Age:
    """arenas: of all that save these shards; None where a run's arena is not on this host."""
    return Age(last_saved(store, shards), not all(arena is not None and arena.alive for arena in arenas))


def lag_of(arena: ArenaView) -> int:
    """Iterations since the oldest copy was made that is not durable yet, 0 when all are."""
    from scarctl.version import step_of

    waiting = arena.version[(arena.version != arena.durable) & (arena.version >= 0)]
    return max(arena.head_step - int(step_of(waiting).min()), 0) if len(waiting) else 0


def since_of(arena: ArenaView, step: int) -> int:
    """Iterations since the arena's distances were taken: with its newest checkpoint."""
    from scarctl.version import step_of

    newest = max(int(arena.version.max(initial=-1)), arena.sealed)
    return max(0, step - int(step_of(newest))) if newest >= 0 else 0
