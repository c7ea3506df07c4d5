"""Test when a reader may rely on the slot that it holds."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.slot import Slot
from scarctl.errors import Contention
from scarctl.state.version import pack
from tests.arena.arenas import ALL, create
from tests.daemon.rig import STORE_ID, copy_into, values


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    made = create(tmp_path / "run")
    assert copy_into(made, ALL, pack(1, 1), 1, whole="ab" * 16)
    return made


def test_a_moment_is_left_out_while_its_slot_is_held(arena: Arena) -> None:
    with arena.held(60) as hold:
        assert hold.slot is arena.slot
        assert copy_into(arena, ALL, pack(1, 2), 2), "the other slot is free"
        assert hold.lasts()
        assert not copy_into(arena, ALL, pack(1, 3), 3)
        assert values(hold.slot, 0) == {1}
        with arena.held(60) as second:
            assert second.slot is hold.slot, "all readers hold the same slot"
            assert second.number == hold.number
        assert hold.end()
    assert copy_into(arena, ALL, pack(1, 4), 4)
    with arena.held(60) as third:
        assert third.number != hold.number
        assert third.slot is arena.slot
    arena.remove()


def test_a_hold_ends_for_a_flush_and_at_its_deadline(arena: Arena) -> None:
    with arena.held(60) as hold:
        assert copy_into(arena, ALL, pack(1, 2), 2)
        assert copy_into(arena, ALL, pack(1, 3), 3, flush=True)
        assert not hold.lasts()
        assert not hold.end()
    with arena.held(60) as hold:
        assert copy_into(arena, ALL, pack(1, 3), 3, flush=True)
        assert not hold.lasts(), "its state is not the newest one any more"
    with arena.held(0.01) as hold:
        assert copy_into(arena, ALL, pack(1, 4), 4)
        time.sleep(0.02)
        with arena.held(60) as second:
            assert second.slot is arena.slot, "it is not joined past its deadline"
            assert not hold.lasts()
            assert second.lasts()
    arena.remove()


def test_a_hold_of_a_process_that_died_is_not_joined(arena: Arena) -> None:
    other = Arena.share(arena.folder, run_id=STORE_ID)
    assert other is not None
    with arena.held(60) as left:
        assert copy_into(arena, ALL, pack(1, 2), 2)
        with other.held(60) as hold:
            assert hold.slot.number == arena.current
            assert not left.lasts()
    other.close()
    arena.remove()


def test_training_does_not_wait_for_a_process_that_is_stopped(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scarctl.arena.slots._PATIENCE", 0.15)
    monkeypatch.setattr("scarctl.arena.slots._TRAINING_PATIENCE", 0.05)
    monkeypatch.setattr("scarctl.arena.slots._FLUSH_PATIENCE", 0.3)
    waited = []
    fd = os.open(arena.folder / "arena", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    for flush in (False, False, True, True):
        began = time.monotonic()
        if flush:
            with pytest.raises(Contention):
                arena.begin_moment(flush=True)
        else:
            assert arena.begin_moment() is None
        waited.append(time.monotonic() - began)
    assert not arena.writable
    os.close(fd)
    assert waited[1] < 0.05 <= waited[0] < 0.3 <= min(waited[2:]), (
        "the first checkpoint waits, and each flush"
    )
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
    assert arena.writable
    assert arena.begin_moment() is not None
    arena.remove()


def test_a_look_says_whether_anything_was_written_into_the_slot(tmp_path: Path) -> None:
    arena = create(tmp_path / "a")
    assert copy_into(arena, ALL, pack(1, 1), 1)
    look = arena.look()
    assert arena.begin_moment() is not None, "a checkpoint that never ends writes into the other slot"
    assert look.lasts()
    assert copy_into(arena, ALL, pack(1, 2), 2)
    assert look.lasts(), "nor did this one write into it"
    assert arena.begin_moment() is not None
    assert not look.lasts()
    assert copy_into(arena, ALL, pack(1, 3), 3)
    assert not look.lasts(), "it is current again, with another state"
    arena.remove()


def test_a_look_that_has_lasted_has_seen_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = create(tmp_path / "a")
    assert copy_into(arena, ALL, pack(1, 1), 1, whole="ab" * 16)
    look, name = arena.look(), Slot.name
    assert copy_into(arena, ALL, pack(1, 2), 2, whole="cd" * 16)
    seen = []

    def named(slot: Slot, whole: str) -> None:
        name(slot, whole)
        seen.append((slot.moment, look.slot.whole, look.lasts()))

    monkeypatch.setattr(Slot, "name", named)
    begun = arena.begin_moment()
    assert begun is not None
    arena.flip(*begun, pack(1, 3), "ef" * 16)
    assert seen == [(1, "", False), (1, "ef" * 16, False)], "the moment is written last"
    arena.remove()
