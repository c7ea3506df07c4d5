"""Test to which state in memory ranks go back together, after all of them were killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.header import EXTRAS
from scarctl.distributed.common_state import agree_in_memory
from scarctl.persist.saver import reconcile
from scarctl.state.version import NEVER, epoch_of, pack, step_of
from scarctl.store import ShardState
from tests.arena.arenas import ALL, create, reopen
from tests.daemon.rig import acknowledge, copy_into
from tests.daemon.rig import values as values_of


class OtherRanks:
    """A team in which this rank is the first, and the others say what is given."""

    rank = 0

    def __init__(self, *others: list[Any]) -> None:
        self._others = others

    def gather(self, value: object) -> list[Any]:
        return [value, *self._others]


def name(step: int) -> str:
    return f"{step:02x}" * 16


def checkpoint(arena: Arena, step: int) -> None:
    """Copy the state of `step`, in which everything has that value, with its extras."""
    assert copy_into(arena, ALL, pack(arena.epoch, step), step, whole=name(step), extras={"step": step})


def values(arena: Arena) -> set[int]:
    """Return the byte values in the newest state."""
    return set().union(*(values_of(arena, int(i)) for i in ALL))


def agree(arena: Arena, *others: list[Any]) -> int:
    """Return the step of the arena's newest state after ranks have agreed."""
    agree_in_memory(arena, OtherRanks(*others))  # type: ignore[arg-type]
    return step_of(arena.slot.head)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    made = create(tmp_path / "run")
    checkpoint(made, 5)
    checkpoint(made, 10)
    made.reach(12)
    return made


def others(*steps: int, ended: bool = False) -> list[Any]:
    return [ended, [name(step) for step in steps]]


def test_the_newest_state_of_all(arena: Arena) -> None:
    assert agree(arena, others(10, 5), others(10)) == 10
    assert agree(arena, others(5), others(10, 5)) == 5
    assert (arena.whole, arena.head_step, values(arena)) == (name(5), 12, {5})
    found = read_extras(arena, arena.slot.number)
    assert found is not None
    assert found.tree == {"step": 5}


def test_what_is_newer_is_forgotten(arena: Arena) -> None:
    acknowledge(arena, ALL)
    assert agree(arena, others(5)) == 5
    assert [slot.whole for slot in arena.complete_states()] == [name(5)]
    assert not arena.spare.intact().any()
    assert arena.pending().all()
    assert (arena.sealed, arena.kept) == (NEVER, 0)
    checkpoint(arena, 6)
    assert (values(arena), step_of(arena.slot.head)) == ({6}, 6)


def test_the_store_s_newer_copies_do_not_count_as_newer(arena: Arena) -> None:
    assert agree(arena, others(5)) == 5
    stored = ShardState(0, ids=ALL, version=np.full(ALL.size, pack(arena.epoch, 10)))
    reconcile(arena, stored, arena.epoch + 3)
    assert (values(arena), arena.whole, arena.pending().all()) == ({5}, name(5), True)
    assert (epoch_of(arena.newest()) == 1 + 3).all()


@pytest.mark.parametrize("theirs", [others(10), others(10, 5), others(7), others(), others(5, ended=True)])
def test_nothing_changes(arena: Arena, theirs: list[Any]) -> None:
    """They agree already; or there is no common state; or a rank has copied its last iteration when it ended."""
    assert agree(arena, theirs) == 10
    assert arena.spare.intact().all()


def test_a_rank_that_ended_keeps_its_last_iteration(arena: Arena) -> None:
    arena.note_last(arena.slot.moment)
    assert agree(arena, others(5)) == 10
    checkpoint(arena, 15)  # it did not end, after all
    assert agree(arena, others(10)) == 10


def test_a_state_that_was_being_replaced_is_none(arena: Arena) -> None:
    begun = arena.begin_moment()
    assert begun is not None
    assert agree(arena, others(5)) == 10


def test_a_state_without_its_extras_is_none(arena: Arena) -> None:
    (arena.folder / EXTRAS[arena.spare.number]).unlink()
    assert agree(arena, others(5)) == 10
    assert arena.spare.intact().all()


def test_it_may_be_repeated_in_another_process(arena: Arena) -> None:
    """One that dies after it has gone back, before the store is opened."""
    assert agree(arena, others(5)) == 5
    arena.close()
    found = reopen(arena.folder)
    assert found is not None
    found.settle()
    assert agree(found, others(5)) == 5
    assert values(found) == {5}
