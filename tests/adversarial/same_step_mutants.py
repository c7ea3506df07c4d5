"""Define wrong versions of scarctl that `same_step` has to find: each lacks one comparison of identities."""

from __future__ import annotations

from unittest import mock

from scarctl.arena.arena import Arena
from scarctl.arena.slots import Hold
from scarctl.recovery import plan as planning
from scarctl.state.identity import Identities
from scarctl.store import ShardState
from scarctl.store.record import Record


def _by_step(identities: Identities, step: int, there: str, *, changed: bool, extras: object) -> str:
    return f"{step + 1:032x}"


def _equal_steps(tier: object, state: ShardState, arena: Arena | None) -> str:
    return "ab" * 16


def _nothing(*_: object) -> None:
    return


def _always(*_: object) -> bool:
    return True


_APPLY = ShardState.apply


def _still_whole(state: ShardState, record: Record, *args: object, **kwargs: object) -> None:
    whole = state.whole
    _APPLY(state, record, *args, **kwargs)  # type: ignore[arg-type]
    state.whole = state.whole or whole


MUTANTS = {
    "a state is named by its step alone": mock.patch.object(Identities, "of", _by_step),
    "equal steps are taken for one state": mock.patch.object(planning, "_whole_of", _equal_steps),
    "a part leaves its lane what it was": mock.patch.object(ShardState, "apply", _still_whole),
    "what differs between the slots is not copied": mock.patch.object(Arena, "carry", _nothing),
    "a saver does not look at its hold": mock.patch.object(Hold, "lasts", _always),
}
