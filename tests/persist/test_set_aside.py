"""Test hand-overs whose rows were copied out of the arena: the store gets these, however memory changes meanwhile."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

from scarctl.arena.staged import copy_out
from scarctl.errors import Corruption
from scarctl.persist.inherited import adopt_orphans
from scarctl.state.version import NEVER, step_of
from scarctl.util.arrays import Ids
from tests.daemon.rig import Rig

SOME = np.array([0, 3, 4, 11, 18])


def _set_aside(rig: Rig, ids: Ids, step: int, *, sealed: bool = False, extras: Any = "step") -> int:
    """Queue the arena's copies of `ids` as a checkpoint of `step` does, and return the hand-over's number."""
    whole = uuid.uuid4().hex if sealed else ""
    if sealed:
        rig.arena.name_whole(whole)
    extras = {"step": step} if extras == "step" else extras
    staged = copy_out(rig.arena, ids)
    return rig.queue.put(version=rig.version(step), ids=ids, whole=whole, extras=extras, staged=staged)


def test_the_store_gets_what_was_set_aside_and_not_what_memory_has_by_then(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME, 2)
    number = _set_aside(rig, SOME, 2)
    rig.copy(rig.everything, 3)
    rig.arena.begin(SOME[:2])  # and the next copy is under way
    rig.persist(number)
    steps, content = rig.stored()
    assert set(steps[SOME]) == set(content[SOME]) == {2}
    assert set(np.delete(content, SOME)) == {1}
    assert rig.extras() == {"step": 2}
    assert rig.arena.pending().all(), "memory has newer copies of all"
    assert not list(rig.arena.folder.glob("*rows-*"))
    rig.arena.end(SOME[:2], rig.version(4))


def test_a_whole_state_is_sealed_though_all_of_memory_has_changed(rig: Rig) -> None:
    rig.copy(rig.everything, 1)
    number = _set_aside(rig, rig.everything, 1, sealed=True)
    rig.copy(rig.everything, 2)
    rig.persist(number)
    assert rig.sealed() == {1}
    assert step_of(rig.arena.sealed) == 1
    assert set(rig.stored()[1]) == {1}
    assert set(step_of(rig.arena.newest())) == {2}


def test_an_older_copy_replaces_no_newer_one(rig: Rig) -> None:
    """An evacuation saves the newest copies in memory, before it comes to what was set aside."""
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME, 2)
    number = _set_aside(rig, SOME, 2)
    rig.persist(rig.save(SOME[1:3], 3))
    rig.persist(number)
    steps, content = rig.stored()
    assert steps[SOME].tolist() == content[SOME].tolist() == [2, 3, 3, 2, 2]
    assert not rig.arena.pending().any()


def test_without_one_of_its_rows_nothing_is_sealed(rig: Rig) -> None:
    rig.copy(rig.everything, 1)
    number = _set_aside(rig, rig.everything, 1, sealed=True)
    rig.persist(rig.save(SOME[:1], 3))
    rig.persist(number)
    assert rig.sealed() == set(), "it would be of two steps"
    assert rig.arena.sealed == NEVER
    assert rig.extras() == {"step": 3}
    steps, content = rig.stored()
    assert steps[SOME[0]] == content[SOME[0]] == 3
    assert set(np.delete(content, SOME[0])) == {1}


def test_what_was_set_aside_is_saved_though_memory_lost_a_newer_copy(rig: Rig) -> None:
    """A process was killed within a copy, and its newer copies were saved first."""
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME, 2)
    number = _set_aside(rig, SOME, 2)
    rig.copy(SOME[:3], 3)
    rig.arena.begin(SOME[3:])
    rig.persist(rig.hand_over(SOME[:3], 3))
    rig.persist(number)
    steps, content = rig.stored()
    assert steps[SOME].tolist() == content[SOME].tolist() == [3, 3, 3, 2, 2]
    rig.arena.end(SOME[3:], rig.version(3))


def test_a_second_copy_of_the_same_step_is_adopted(rig: Rig) -> None:
    """Values were loaded without a step, copied into memory, and the process died before it handed them over."""
    rig.copy(rig.everything, 1)
    number = _set_aside(rig, rig.everything, 1, sealed=True)
    rig.copy(SOME, 1, value=9)
    assert adopt_orphans(rig.arena, rig.queue) == SOME.size
    for waiting in (number, number + 1):
        rig.persist(waiting)
    assert not rig.arena.pending().any()
    _, content = rig.stored()
    assert set(content[SOME]) == {9}
    assert set(np.delete(content, SOME)) == {1}


def test_copies_that_are_older_than_rows_that_wait_are_adopted(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    others = np.setdiff1d(rig.everything, SOME)
    rig.copy(SOME, 2)  # the store was not to get them
    rig.copy(others, 3)
    number = _set_aside(rig, others, 3)
    adopt_orphans(rig.arena, rig.queue)
    for waiting in (number, number + 1):
        rig.persist(waiting)
    assert not rig.arena.pending().any()
    steps, content = rig.stored()
    assert set(steps[SOME].tolist()) == set(content[SOME].tolist()) == {2}
    assert set(steps[others].tolist()) == {3}


def test_rows_of_another_size_are_refused(rig: Rig) -> None:
    rig.copy(SOME, 1)
    number = _set_aside(rig, SOME, 1)
    [rows] = rig.arena.folder.glob("rows-*")
    with open(rows, "ab") as file:
        file.write(b"\0")
    with pytest.raises(Corruption, match="bytes, and its hand-over"):
        rig.persist(number)
