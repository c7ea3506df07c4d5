"""Test what becomes of a dead process's memory: its newest moment is a whole state, of the epoch that begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scarctl.persist.saver import reconcile
from scarctl.state.version import step_of
from scarctl.store import Store, complete_sets
from tests.daemon.rig import Rig

SOME = np.array([0, 3, 4, 11, 18])
WHOLE = "cd" * 16


def test_what_was_never_asked_for_is_saved_as_a_whole_state(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME[:2], 2, whole=WHOLE)
    rig.copy(SOME[2:], 3, whole=WHOLE)
    rig.arena.adopt()
    assert rig.arena.wants_whole
    rig.persist(rig.arena.asked)
    assert rig.sealed() == {1, 3}
    assert rig.stored()[1][SOME].tolist() == [2, 2, 3, 3, 3]
    assert rig.extras() == {"step": 3}
    rig.arena.adopt()
    assert not rig.arena.waits, "the store has it"


def test_a_moment_in_which_nothing_has_changed_is_a_newer_step(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME[:0], 4, whole=WHOLE)
    rig.arena.adopt()
    rig.persist(rig.arena.asked)
    assert rig.sealed() == {1, 4}
    assert rig.extras() == {"step": 4}


def test_copies_of_several_states_are_saved_and_not_sealed(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME, 3)
    rig.arena.adopt(whole=True)
    assert not rig.arena.waits
    rig.arena.adopt()
    rig.persist(rig.arena.asked)
    assert rig.sealed() == {1}
    assert set(rig.stored()[1][SOME]) == {3}


def test_in_the_next_epoch_memory_is_still_a_whole_state(tmp_path: Path, arena_dir: Path) -> None:
    """Killed within the next moment, of which nothing counts."""
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME[1:], 3, whole=WHOLE)
    begun = rig.arena.begin_moment()
    assert begun is not None
    begun[0].end(SOME[:2], rig.version(4), begun[1])
    rig.die()
    rig = Rig(tmp_path / "store", arena_dir)
    reconcile(rig.arena, rig.writer.state, rig.writer.epoch)
    assert (rig.arena.newest() == rig.version(3)).all()
    assert np.flatnonzero(rig.arena.pending()).tolist() == SOME[1:].tolist()
    assert (rig.arena.spare.moments <= rig.arena.slot.moment).all()
    rig.arena.adopt()
    rig.persist(rig.arena.asked)
    assert rig.sealed() == {1, 3}
    assert rig.stored()[1][SOME].tolist() == [1, 3, 3, 3, 3]
    rig.close()


def test_a_replica_has_no_copy_of_what_the_store_has_newer(tmp_path: Path, arena_dir: Path) -> None:
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME, 3, whole=WHOLE)
    rig.die()
    (tmp_path / "elsewhere").mkdir()
    other = Rig(tmp_path / "store", tmp_path / "elsewhere")
    other.persist(other.save(SOME[:1], 2))
    other.close()
    rig = Rig(tmp_path / "store", arena_dir)
    reconcile(rig.arena, rig.writer.state, rig.writer.epoch)
    assert np.flatnonzero(~rig.arena.intact()).tolist() == SOME[:1].tolist()
    assert rig.arena.whole == ""
    rig.arena.adopt()
    rig.persist(rig.arena.asked)
    assert rig.stored()[1][SOME].tolist() == [2, 3, 3, 3, 3]
    rig.close()


def test_a_seal_that_was_committed_and_not_noted_is_the_state_in_memory(
    tmp_path: Path, arena_dir: Path
) -> None:
    """Killed between the commit and its note: the copies are the store's, which has a newer version of some."""
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    number = rig.save(SOME[:2], 5, sealed=True)
    whole, arena = rig.arena.whole, rig.arena
    noted = arena.saved.copy(), arena.durable.copy(), arena.kept, arena.sealed
    rig.persist(number)
    arena.saved[:], arena.durable[:] = noted[:2]
    arena.keep(noted[2])
    arena.seal(noted[3])
    rig.die()
    rig = Rig(tmp_path / "store", arena_dir)
    reconcile(rig.arena, rig.writer.state, rig.writer.epoch)
    assert rig.arena.intact().all()
    assert rig.arena.whole == whole
    assert not rig.arena.pending().any()
    assert step_of(rig.arena.sealed) == 5
    assert complete_sets(Store.open(str(rig.store.root)))[0].whole == whole
    assert rig.arena.lacking(), "the store's extras may be of an earlier checkpoint of this state"
    rig.arena.adopt()
    rig.persist(rig.arena.asked)
    assert not rig.arena.lacking()
    rig.close()
