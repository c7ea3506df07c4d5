"""Test the view of an arena: what a command sees of a dead run's copies, without taking its lock."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scarctl.arena.folder import arena_folder
from scarctl.arena.view import peek
from scarctl.state.version import pack
from tests.arena.arenas import ALL, LAYOUT, left_behind, reopen
from tests.daemon.rig import STORE_ID, acknowledge


def test_a_view_shows_the_copies_of_a_dead_run(tmp_path: Path) -> None:
    place = arena_folder(str(tmp_path), STORE_ID)
    file = left_behind(place)
    arena = reopen(place)
    assert arena is not None
    acknowledge(arena, ALL[::2])
    arena.encoding_error[1] = 2.0
    arena.close()
    before = file.read_bytes()
    view = peek(str(tmp_path), STORE_ID)
    assert view is not None
    assert view.layout == LAYOUT
    assert (view.version == pack(1, 9)).all()
    assert view.pending == LAYOUT.partitions // 2
    assert np.flatnonzero(view.encoding_error != -1).tolist() == [1], "the others are exact"
    assert file.read_bytes() == before
