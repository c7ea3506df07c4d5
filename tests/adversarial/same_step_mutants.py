"""Define wrong versions of scarctl that `same_step` has to find: each lacks one comparison of identities."""

from __future__ import annotations

from unittest import mock

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.queue import HandOver
from scarctl.persist.persister import Persister
from scarctl.recovery import plan as planning
from scarctl.state.identity import Identities
from scarctl.store import ShardState
from scarctl.store.record import Record
from scarctl.util.arrays import Ids


def _by_step(identities: Identities, step: int, there: str, *, changed: bool, extras: object) -> str:
    return f"{step + 1:032x}"


def _equal_steps(tier: object, state: ShardState, arena: Arena | None) -> str:
    return "ab" * 16


def _any_copy(saver: Persister, handover: HandOver, ids: Ids) -> bool:
    arena, version = saver._arena, handover.version
    done = arena.durable == arena.version
    done[ids] = True
    return bool((done & (arena.version <= version) & arena.intact()).all())


def _unmoved(arena: Arena, ids: Ids) -> None:
    arena.generation[ids] |= np.uint64(1)


_APPLY = ShardState.apply


def _still_whole(state: ShardState, record: Record, *args: object, **kwargs: object) -> None:
    whole = state.whole
    _APPLY(state, record, *args, **kwargs)  # type: ignore[arg-type]
    state.whole = state.whole or whole


_PERSIST = Persister.persist


def _by_number(saver: Persister, handover: HandOver) -> int:
    """Persist a hand-over; what has the number of the hand-over before counts as that one."""
    if saver._sealed[0] == handover.number:
        saver._sealed = handover.number, handover.whole
    return _PERSIST(saver, handover)


def _by_name(saver: Persister, handover: HandOver) -> int:
    if saver._sealed[1] == handover.whole:
        saver._sealed = handover.number, handover.whole
    return _PERSIST(saver, handover)


MUTANTS = {
    "a state is named by its step alone": mock.patch.object(Identities, "of", _by_step),
    "equal steps are taken for one state": mock.patch.object(planning, "_whole_of", _equal_steps),
    "a waiting seal takes whatever was copied since": mock.patch.object(Persister, "_is_of", _any_copy),
    "a copy leaves the arena what it was": mock.patch.object(Arena, "begin", _unmoved),
    "a part leaves its lane what it was": mock.patch.object(ShardState, "apply", _still_whole),
    "hand-overs of equal numbers are taken for one": mock.patch.object(Persister, "persist", _by_number),
    "hand-overs of equal names are taken for one": mock.patch.object(Persister, "persist", _by_name),
}
