"""Test hand-overs with rows of their own: memory may change while they are saved, and nothing older replaces newer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scarctl.arena.staged import copy_out
from scarctl.persist.thread import PersisterThread
from scarctl.state.encodings import Encoding
from tests.daemon.rig import Rig

SOME = np.array([0, 3, 4, 11, 18])


def begun(rig: Rig) -> Rig:
    rig.persist(rig.save(rig.everything, 1, sealed=True, staged=True))
    assert rig.sealed() == {1}
    return rig


def test_what_has_not_changed_since_is_no_longer_pending(rig: Rig) -> None:
    begun(rig)
    first = rig.save(SOME[:3], 2, staged=True)
    rig.copy(SOME[:1], 3)
    rig.copy(SOME[1:2], 2, value=77)  # at the same step
    rig.persist(first)
    assert np.flatnonzero(rig.arena.pending()).tolist() == SOME[:2].tolist()
    rig.persist(rig.hand_over(SOME[:2], 3, staged=True))
    assert not rig.arena.pending().any()
    assert rig.stored()[1][SOME[:3]].tolist() == [3, 77, 2]


def test_copies_keep_their_own_steps(rig: Rig) -> None:
    begun(rig)
    rig.copy(SOME[:2], 2)
    rig.copy(SOME[2:], 3)
    rig.persist(rig.hand_over(SOME, 4, staged=True))
    assert rig.stored()[0][SOME].tolist() == [2, 2, 3, 3, 3]


def test_a_whole_state_replaces_encoded_copies_that_have_not_changed(rig: Rig) -> None:
    def put(step: int, encoding: Encoding, whole: str = "") -> int:
        staged = rig.queue.put(
            version=rig.version(step),
            ids=SOME,
            whole=whole,
            extras={"step": step},
            encoding=encoding,
            staged=copy_out(rig.arena, SOME),
        )
        return rig.persist(staged)

    begun(rig)
    rig.copy(SOME, 2, value=63)
    assert put(2, "int8") < rig.layout.partition_bytes[SOME].sum()
    lossy = rig.arena.encoding_error >= 0
    assert lossy.any()
    assert not rig.arena.pending().any()
    assert put(3, "exact", "ab" * 16) == rig.layout.partition_bytes[lossy].sum()
    assert (rig.arena.encoding_error == -1).all()
    assert rig.sealed() == {1, 3}


@pytest.mark.parametrize("damage", ["gone", "short", "long"])
def test_a_hand_over_without_its_rows_is_set_aside_and_later_ones_are_saved(rig: Rig, damage: str) -> None:
    begun(rig)
    bad, good = rig.save(SOME, 2, staged=True), rig.save(SOME[:1], 3, staged=True)
    rows = rig.queue._rows(bad)
    content = rows.read_bytes()
    rows.unlink() if damage == "gone" else rows.write_bytes(
        content[:-1] if damage == "short" else content + b"x"
    )
    thread = PersisterThread(rig.persister, rig.queue)
    assert not thread.drain(30.0), "not all that was handed over is durable"
    assert thread.failure is None
    thread.close()
    assert rig.queue.numbers() == []
    assert not rig.queue.has(good)
    assert np.flatnonzero(rig.arena.pending()).tolist() == SOME[1:].tolist()
    assert rig.stored()[1][SOME[0]] == 3
    assert [path.suffix for path in rig.arena.folder.glob("staged-*")] == [".bad"]


def test_one_that_is_replaced_while_it_is_read_is_no_fault(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training queues a whole state, which has all of it, and removes it."""
    begun(rig)
    number, read = rig.save(SOME, 2, staged=True), rig.queue.read

    def replaced(one: int) -> Any:
        found = read(one)
        rig.queue.remove(one)
        return found

    monkeypatch.setattr(rig.queue, "read", replaced)
    thread = PersisterThread(rig.persister, rig.queue)
    assert thread.drain(30.0)
    thread.close()
    assert (thread.stats.errors, rig.queue.has(number)) == (0, False)
