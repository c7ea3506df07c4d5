"""Test reading the notes that one process saved with a state, in a real arena's queue and a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.arena.notes import stored_notes, waiting_notes
from scarctl.errors import Corruption
from scarctl.state.caveats import Caveat
from scarctl.state.extras import Notes
from scarctl.store import ShardState
from tests.daemon.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "store", tmp_path)
    yield made
    made.close()


def save(rig: Rig, step: int, *, sealed: bool = True) -> int:
    rig.copy(rig.everything, step)
    notes = Notes(caveats=(Caveat("kind", f"of step {step}"),))
    return rig.hand_over(rig.everything, step, sealed=sealed, extras=notes.to_tree())


def messages(notes: Notes | None) -> list[str] | None:
    return None if notes is None else [caveat.message for caveat in notes.caveats]


def states(rig: Rig) -> list[ShardState]:
    return list(rig.store.states(rig.store.shards()).values())


def test_the_newest_hand_over_with_extras_or_that_of_a_commit(rig: Rig) -> None:
    assert waiting_notes(rig.queue) is None
    save(rig, 1)
    first = rig.arena.whole
    save(rig, 2, sealed=False)
    rig.hand_over(rig.everything, 2, extras=None)
    assert messages(waiting_notes(rig.queue)) == ["of step 2"]
    assert messages(waiting_notes(rig.queue, first)) == ["of step 1"]
    assert waiting_notes(rig.queue, "ab" * 16) is None


def test_a_damaged_hand_over_is_skipped(rig: Rig) -> None:
    save(rig, 1)
    number = save(rig, 2)
    (path,) = rig.arena.folder.glob(f"handover-{number:020}*")
    path.write_bytes(b"damaged")
    assert messages(waiting_notes(rig.queue)) == ["of step 1"]


def test_notes_in_the_store_are_those_of_their_commit(rig: Rig) -> None:
    wholes = []
    for step in (1, 2):
        rig.persist(save(rig, step))
        wholes.append(rig.arena.whole)
    rig.persist(save(rig, 3, sealed=False))
    for step, whole in enumerate(wholes, 1):
        assert messages(stored_notes(rig.store, states(rig), whole)) == [f"of step {step}"]
    with pytest.raises(Corruption, match="no longer has its extras"):
        stored_notes(rig.store, states(rig), "ab" * 16)


def test_a_state_that_no_session_saved_has_none(rig: Rig) -> None:
    assert stored_notes(rig.store, states(rig), "ab" * 16) == Notes()
