"""Test reading the notes that one process saved with a state, in a real arena and a real store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.arena.notes import memory_notes, notes_in, stored_notes
from scarctl.errors import Corruption
from scarctl.state.caveats import Caveat
from scarctl.state.extras import Notes
from scarctl.store import ShardState
from tests.daemon.rig import Rig, copy_into


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "store", tmp_path)
    yield made
    made.close()


def save(rig: Rig, step: int, *, sealed: bool = True) -> int:
    notes = Notes(caveats=(Caveat("kind", f"of step {step}"),))
    whole = uuid.uuid4().hex if sealed else ""
    assert copy_into(rig.arena, rig.everything, rig.version(step), step, whole=whole, extras=notes.to_tree())
    return rig.arena.ask(whole=True)


def messages(notes: Notes | None) -> list[str] | None:
    return None if notes is None else [caveat.message for caveat in notes.caveats]


def states(rig: Rig) -> list[ShardState]:
    return list(rig.store.states(rig.store.shards()).values())


def test_notes_in_memory_are_the_newest_or_those_of_a_commit(rig: Rig) -> None:
    assert memory_notes(rig.arena) is None
    save(rig, 1)
    first = rig.arena.whole
    save(rig, 2, sealed=False)
    assert messages(memory_notes(rig.arena)) == ["of step 2"]
    assert messages(memory_notes(rig.arena, first)) == ["of step 1"]
    assert memory_notes(rig.arena, "ab" * 16) is None
    assert messages(notes_in(rig.arena.folder)) == ["of step 2"]


def test_damaged_extras_are_left_out(rig: Rig) -> None:
    save(rig, 1)
    (rig.arena.folder / f"extras-{rig.arena.current}.safetensors").write_bytes(b"damaged")
    assert memory_notes(rig.arena) is None


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
