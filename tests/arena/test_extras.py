"""Test extras in memory: those of one slot become those of the other, and never those of another state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.extras import carry_extras, read_extras
from scarctl.arena.header import EXTRAS
from scarctl.state import codec
from scarctl.state.version import pack
from tests.arena.arenas import ALL, create
from tests.daemon.rig import copy_into

TREE = {"step": 1, "noise": np.arange(7), "name": "ab"}


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = create(tmp_path / "run")
    assert copy_into(made, ALL, pack(1, 1), 1, extras=TREE)
    yield made
    made.remove()


def carried(arena: Arena) -> object:
    """Carry the extras into the other slot, make that current, and return them."""
    begun = arena.begin_moment()
    assert begun is not None
    slot, moment = begun
    arena.carry(ALL)
    carry_extras(arena, moment)
    arena.flip(slot, moment, arena.slot.head, "")
    found = read_extras(arena)
    assert found is not None
    return found.tree


def test_they_are_carried_over_without_being_decoded(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica carries them over while its owner's host is about to be lost."""
    with monkeypatch.context() as patch:
        for name in ("encode", "decode"):
            patch.delattr(codec, name)
        carry_extras(arena, arena.newest_moment + 1)
    for _ in range(3):
        tree = carried(arena)
        assert isinstance(tree, dict)
        np.testing.assert_equal(tree, TREE)


@pytest.mark.parametrize("at", [0, 12, -1])
def test_damaged_ones_are_left_out(arena: Arena, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the damage is found only when they are read."""
    path = arena.folder / EXTRAS[arena.current]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert carried(arena) is None
    assert "cannot be read" in caplog.text


def test_they_need_no_more_space_once_they_are_there(arena: Arena) -> None:
    """Other programs may fill the folder. Shorter ones leave nothing of the longer ones."""
    assert carried(arena) is not None
    sizes = {(arena.folder / name).stat().st_size for name in EXTRAS}
    for tree in ({**TREE, "name": "a" * 2000}, {"step": 3}, {"step": 4, "noise": np.arange(3)}):
        path = arena.folder / EXTRAS[arena.spare.number]
        place = path.stat().st_ino
        assert copy_into(arena, ALL, pack(1, 2), 2, extras=tree)
        assert (arena.folder / EXTRAS[arena.current], path.stat().st_ino) == (path, place)
        assert max(sizes) - min(sizes) < 8
        assert max(sizes) - 8 < path.stat().st_size < min(sizes) + 8
        assert {one.name for one in arena.folder.iterdir()} == {"arena", *EXTRAS}
        found = read_extras(arena)
        assert found is not None
        np.testing.assert_equal(found.tree, tree)


def test_those_that_are_being_written_are_no_damage(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    assert carried(arena) is not None
    before = arena.spare
    path = arena.folder / EXTRAS[before.number]
    path.write_bytes(path.read_bytes()[:40])
    found = read_extras(arena, before.number)
    assert found is not None
    assert found.tree is None
    assert not caplog.records


def test_those_of_an_earlier_state_are_not_carried_over(arena: Arena) -> None:
    begun = arena.begin_moment()
    assert begun is not None
    slot, moment = begun
    arena.carry(ALL)
    arena.flip(slot, moment, pack(1, 2), "")
    assert carried(arena) is None
