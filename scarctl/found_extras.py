"""Extras that were saved: in the queue of hand-overs and in the store, newest first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from scarctl.dtypes import torched
from scarctl.engine import Engine
from scarctl.errors import Corruption, NoIntactCopy
from scarctl.recovery import Plan
from scarctl.store import ShardState, Store
from scarctl.version import step_of


def all_extras(engine: Engine) -> Iterator[tuple[int, Any]]:
    """Version and content of all extras that can be read, newest first. Raises Unavailable, AccessDenied."""
    waiting = (
        (h.version, h.whole, h.extras) for h in reversed(engine.queue.pending()) if h.extras is not None
    )
    states = engine.store.states(engine.store.shards()).values()
    stored = [stored_extras(engine.store, state, []) for state in states]
    for version, _, extras in heapq.merge(waiting, *stored, key=lambda found: -found[0]):
        yield version, torched(extras)


def newest_extras(engine: Engine, states: Mapping[int, ShardState]) -> tuple[int, str, Any] | None:
    """Version, commit of the whole state and content of the newest extras; None when none were ever saved.

    Raises NoIntactCopy when there are some and none can be read.
    """
    # Newest first: of two of the same version the later one counts.
    waiting = reversed(engine.queue.pending())
    candidates = [(h.version, h.whole, h.extras) for h in waiting if h.extras is not None]
    damaged: list[str] = []
    for state in states.values():
        found = next(stored_extras(engine.store, state, damaged), None)
        if found is not None:
            candidates.append(found)
    if not candidates and damaged:
        raise NoIntactCopy(
            f"{engine.store.url}: the extras (optimizer's counts, random numbers) are damaged: {'; '.join(damaged)}",
            hint="nothing was changed; `scarctl verify` lists what is damaged",
        )
    if not candidates:
        return None
    version, whole, extras = max(candidates, key=lambda found: found[0])
    return version, whole, torched(extras)


def stored_extras(store: Store, state: ShardState, damaged: list[str]) -> Iterator[tuple[int, str, Any]]:
    """A shard's extras up to `state`, newest first; those that cannot be read are skipped, and named in `damaged`."""
    if state.extras is None:
        return
    older = (
        store.state(state.shard, at=record.seq)
        for record in reversed(list(store.records(state.shard)))
        if record.extras and record.seq <= state.seq
    )
    for candidate in itertools.chain([state], older):
        try:
            found = store.read_extras(candidate)
        except Corruption as error:
            damaged.append(error.message)
        else:
            if found is not None:
                yield found[0], candidate.extras_whole, found[1]


def sealed_extras(store: Store, plan: Plan) -> Any:
    """Extras of the sealed state that `plan` goes back to."""
    damaged: list[str] = []
    own = plan.states.values()
    # A rank that owns nothing has no part in what was sealed, and its own extras.
    for state in own or store.states(store.shards()).values():
        for version, whole, extras in stored_extras(store, state, damaged):
            if step_of(version) == plan.step and whole == (plan.whole or whole):
                return torched(extras)
            if own:
                break
    raise NoIntactCopy(
        f"{store.url}: the sealed state of step {plan.step} has no intact extras: {'; '.join(damaged) or 'none saved'}",
        hint="nothing was changed; recover the lost partitions only (partial)",
    )
