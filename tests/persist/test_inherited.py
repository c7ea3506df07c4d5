"""Test what becomes of a dead process's memory: its newest moment is a whole state, unless it died within a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.persist.inherited import adopt_orphans, reconcile
from scarctl.state.version import NEVER, step_of
from tests.daemon.rig import Rig

SOME = np.array([0, 3, 4, 11, 18])
FIRST, WHOLE = "ab" * 16, "cd" * 16


def checkpoint(rig: Rig, ids: np.ndarray, step: int, whole: str = WHOLE) -> None:
    """Bring memory up to a step, as the process does that then dies."""
    rig.copy(ids, step)
    note(rig, step, whole)


def note(rig: Rig, step: int, whole: str = WHOLE) -> None:
    rig.queue.note(version=rig.version(step), whole=whole, extras={"step": step})
    rig.arena.name_whole(whole)
    if whole:
        rig.arena.note_moment(rig.version(step))


def saved(rig: Rig) -> Rig:
    for number in rig.queue.numbers():
        rig.persist(number)
    return rig


def test_the_newest_moment_is_queued_as_a_whole_state(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME[:2], 2)
    checkpoint(rig, SOME[2:], 3)
    assert adopt_orphans(rig.arena, rig.queue) == 0, "nothing else is left"
    (found,) = rig.queue.pending()
    assert (found.whole, found.ids.tolist(), found.extras) == (WHOLE, SOME[2:].tolist(), {"step": 3})
    adopt_orphans(rig.arena, rig.queue)
    assert len(rig.queue.numbers()) == 1, "once"
    saved(rig)
    assert rig.sealed() == {1, 3}
    assert rig.stored()[1][SOME].tolist() == [2, 2, 3, 3, 3]
    adopt_orphans(rig.arena, rig.queue)
    assert rig.queue.numbers() == [], "the store has it"


def test_a_moment_in_which_nothing_has_changed_is_a_newer_step(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    note(rig, 4)
    adopt_orphans(rig.arena, rig.queue)
    saved(rig)
    assert rig.sealed() == {1, 4}
    assert rig.extras() == {"step": 4}


@pytest.mark.parametrize("torn", [False, True])
def test_killed_within_a_copy_it_is_a_mix_and_not_sealed(rig: Rig, torn: bool) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    checkpoint(rig, SOME, 3)
    rig.copy(SOME[:2], 4)
    if torn:
        rig.arena.begin(SOME[2:3])
    assert adopt_orphans(rig.arena, rig.queue) == 2
    moment, newer = rig.queue.pending()
    assert (moment.whole, moment.extras, moment.ids.tolist()) == ("", {"step": 3}, SOME[2 + torn :].tolist())
    assert (newer.whole, newer.extras, newer.ids.tolist()) == ("", None, SOME[:2].tolist())
    saved(rig)
    assert rig.sealed() == {1}
    assert rig.stored()[1][SOME].tolist() == [4, 4, 1 if torn else 3, 3, 3]
    assert rig.extras() == {"step": 3}


def test_killed_between_a_copy_and_its_moment_it_is_not_sealed(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    checkpoint(rig, SOME, 3)
    rig.copy(SOME, 4)
    adopt_orphans(rig.arena, rig.queue)
    saved(rig)
    assert rig.sealed() == {1}
    assert set(rig.stored()[1][SOME]) == {4}


@pytest.mark.parametrize("whole", ["", WHOLE])
def test_a_moment_that_waits_with_rows_of_its_own_is_saved_once(rig: Rig, whole: str) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    number = rig.save(SOME, 3, sealed=bool(whole), staged=True)
    note(rig, 3, rig.queue.read(number).whole)
    adopt_orphans(rig.arena, rig.queue)
    records = rig.records()
    saved(rig)
    assert set(rig.stored()[1][SOME]) == {3}
    assert rig.sealed() == {1, 3} if whole else {1}
    assert rig.records() <= records + 2, "one commit, and extras"


@pytest.mark.parametrize("waits", [False, True])
def test_in_the_next_epoch_the_moment_is_still_a_whole_state(
    tmp_path: Path, arena_dir: Path, waits: bool
) -> None:
    """Also if rows of older copies waited for the store: memory has all of them, or newer ones."""
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    if waits:
        rig.save(SOME, 2, sealed=True, staged=True)
    checkpoint(rig, SOME[1:], 3)
    rig.die()
    rig = Rig(tmp_path / "store", arena_dir)
    reconcile(rig.arena, rig.queue, rig.writer.state, rig.writer.epoch)
    assert rig.queue.numbers() == []
    assert not list(rig.arena.folder.glob("*rows-*"))
    assert rig.arena.moment == NEVER
    assert (step_of(rig.arena.version) == 3).all(), "no copy has changed since"
    adopt_orphans(rig.arena, rig.queue)
    (found,) = rig.queue.pending()
    assert (found.version, found.whole, found.extras) == (rig.version(3), WHOLE, {"step": 3})
    saved(rig)
    assert rig.sealed() == {1, 3}
    assert rig.stored()[1][SOME].tolist() == [2 if waits else 1, 3, 3, 3, 3]
    rig.close()


def test_a_moment_of_a_run_that_has_continued_elsewhere_is_no_state(tmp_path: Path, arena_dir: Path) -> None:
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    checkpoint(rig, SOME, 3)
    place = rig.arena.folder
    rig.die()
    (tmp_path / "elsewhere").mkdir()
    other = Rig(tmp_path / "store", tmp_path / "elsewhere")
    other.persist(other.save(SOME[:1], 2))
    other.close()
    rig = Rig(tmp_path / "store", arena_dir)
    assert rig.arena.folder == place
    reconcile(rig.arena, rig.queue, rig.writer.state, rig.writer.epoch)
    adopt_orphans(rig.arena, rig.queue)
    assert all(not found.whole for found in rig.queue.pending())
    saved(rig)
    assert rig.stored()[1][SOME].tolist() == [2, 3, 3, 3, 3]
    rig.close()
