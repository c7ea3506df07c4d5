"""Test an evacuation of memory that is newer than what the store was to get: its extras and its seal are saved, too."""

from __future__ import annotations

import time
import uuid

import numpy as np

from scarctl.arena.staged import copy_out
from scarctl.persist.evacuation import Evacuation
from scarctl.state.version import step_of
from scarctl.util.arrays import Ids
from tests.daemon.rig import Rig

SOME = np.array([0, 3, 4, 11, 18])


def _remember(rig: Rig, ids: Ids, step: int) -> str:
    """Bring memory up to `step`, and hand nothing over; return the state's name."""
    whole = uuid.uuid4().hex
    rig.copy(ids, step)
    rig.queue.note(version=rig.version(step), whole=whole, extras={"step": step})
    rig.arena.name_whole(whole)
    rig.arena.note_moment(rig.version(step))
    rig.arena.reach(step)
    return whole


def _evacuation(rig: Rig, seconds: float = 60.0) -> Evacuation:
    return Evacuation(rig.arena, rig.queue, rig.persister, time.monotonic() + seconds)


def test_what_only_memory_has_is_saved_as_a_whole(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    whole = _remember(rig, SOME, 4)
    evacuation = _evacuation(rig)
    assert evacuation.report().extras_lost
    assert evacuation.report().lost_partitions == SOME.size
    evacuation.run()
    found = evacuation.report()
    assert (found.step, found.lost_partitions, found.extras_lost, found.sealed) == (4, 0, False, True)
    assert found.commit_name == whole
    assert rig.sealed() == {1, 4}
    assert rig.extras() == {"step": 4}
    steps, content = rig.stored()
    assert set(steps) == {4}
    assert set(content[SOME]) == {4}
    moment = rig.queue.moment()
    assert moment is not None, "memory still has it"
    again = _evacuation(rig)
    assert again.report().sealed
    again.run()
    assert again.report().commits == 0


def test_a_moment_in_which_nothing_has_changed_is_one_too(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    _remember(rig, SOME[:0], 4)
    evacuation = _evacuation(rig)
    assert evacuation.report().extras_lost
    evacuation.run()
    found = evacuation.report()
    assert (found.step, found.extras_lost, found.sealed) == (4, False, True)
    assert rig.extras() == {"step": 4}


def test_after_it_comes_what_was_set_aside_before(rig: Rig) -> None:
    """It waits although newer copies were saved, and neither fails nor spoils anything."""
    rig.copy(rig.everything, 2)
    rig.arena.name_whole(whole := uuid.uuid4().hex)
    number = rig.queue.put(
        version=rig.version(2),
        ids=rig.everything,
        whole=whole,
        extras={"step": 2},
        staged=copy_out(rig.arena, rig.everything),
    )
    _remember(rig, SOME, 4)
    evacuation = _evacuation(rig)
    evacuation.run()
    found = evacuation.report()
    assert (found.lost_partitions, found.extras_lost, found.sealed, found.error) == (0, False, True, None)
    assert rig.queue.numbers() == []
    assert not rig.queue.has(number)
    assert step_of(rig.arena.sealed) == 4
    assert rig.extras() == {"step": 4}
    _, content = rig.stored()
    assert set(content[SOME]) == {4}
    assert set(np.delete(content, SOME)) == {2}


def test_no_time_is_no_seal_and_the_extras_are_said_to_be_lost(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    _remember(rig, SOME, 4)
    evacuation = _evacuation(rig, 0.0)
    evacuation.run()
    found = evacuation.report()
    assert (found.lost_partitions, found.extras_lost, found.sealed) == (SOME.size, True, False)
