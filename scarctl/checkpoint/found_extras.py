"""Find saved extras in memory and in the store, newest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.errors import Corruption, NoIntactCopy
from scarctl.recovery.plan import Plan
from scarctl.state.extras import Extras
from scarctl.state.torch_dtypes import torched
from scarctl.state.version import step_of
from scarctl.store import ShardState, Store


@dataclass(frozen=True, slots=True)
class Saved:
    """Saved extras, with their version and commit."""

    version: int
    whole: str
    """Name of the commit of the whole state with these extras; "" for a commit of a part."""
    extras: Extras


def all_extras(arena: Arena, store: Store) -> Iterator[Saved]:
    """Yield all extras that can be read, newest first. Raises Unavailable, AccessDenied, Corruption."""
    stored = stored_extras(store, store.state(store.lane), [])
    return heapq.merge(_in_memory(arena), stored, key=lambda found: -found.version)


def newest_extras(arena: Arena, store: Store, state: ShardState) -> Saved | None:
    """Return the newest extras, of memory and of `state`; None if no extras were ever saved.

    Raises NoIntactCopy if extras were saved, but cannot be read.
    """
    candidates = list(islice(_in_memory(arena), 1))
    damaged: list[str] = []
    candidates += islice(stored_extras(store, state, damaged), 1)
    if not candidates and damaged:
        raise NoIntactCopy(
            f"{store.url}: the extras (step counts, random generators) cannot be used: {'; '.join(damaged)}",
            hint="nothing was changed; `scarctl verify` lists the damage",
        )
    return max(candidates, key=lambda found: found.version, default=None)


def _in_memory(arena: Arena) -> Iterator[Saved]:
    """Yield the extras of the slots, newest first. Those of a moment that was never complete are left out."""
    for number in (arena.current, 1 - arena.current):
        found = read_extras(arena, number)
        if found is not None and found.tree is not None and found.moment <= arena.slot.moment:
            yield Saved(found.version, found.whole, Extras.from_tree(torched(found.tree)))


def stored_extras(store: Store, state: ShardState, damaged: list[str]) -> Iterator[Saved]:
    """Yield a shard's extras up to `state`, newest first. Skip unreadable ones, and add the reasons to `damaged`."""
    if state.extras is None:
        return
    older = (
        store.state(state.shard, at=record.seq)
        for record in store.log(state.shard).back(state.place)
        if record.extras
    )
    for candidate in chain([state], older):
        try:
            found = store.read_extras(candidate)
            extras = None if found is None else Extras.from_tree(torched(found[1]))
        except Corruption as error:
            if error.message not in damaged:  # the newest record is read twice
                damaged.append(error.message)
        else:
            if found is not None and extras is not None:
                yield Saved(found[0], candidate.extras_whole, extras)


def sealed_extras(store: Store, plan: Plan) -> Extras:
    """Return the extras of the sealed state that `plan` restores. Raises NoIntactCopy."""
    damaged: list[str] = []
    # For a rank without partitions, the plan may have the newest state.
    for found in islice(stored_extras(store, plan.state, damaged), 1 if plan.layout.partitions else None):
        if step_of(found.version) == plan.step and found.whole == (plan.whole or found.whole):
            return found.extras
    raise NoIntactCopy(
        f"{store.url}: the sealed state of step {plan.step} has no intact extras: {'; '.join(damaged) or 'none saved'}",
        hint="nothing was changed; recover the lost partitions only (partial)",
    )
