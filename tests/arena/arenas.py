"""Make arenas for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.state.version import pack
from tests.daemon.rig import STORE_ID, copy_into, small_layout

LAYOUT = small_layout()
ALL = np.arange(LAYOUT.partitions)


def create(place: Path) -> Arena:
    return Arena.create(place, LAYOUT, run_id=STORE_ID, epoch=1)


def reopen(place: Path) -> Arena | None:
    return Arena.open_existing(place, run_id=STORE_ID)


def left_behind(place: Path) -> Path:
    """Create the file of an arena with content, whose process has ended."""
    arena = create(place)
    assert copy_into(arena, ALL, pack(1, 9), 9)
    arena.close()
    return place / "arena"
