"""Test the order of one run's arenas on several hosts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.arena.age import age_of
from scarctl.arena.arena import Arena
from scarctl.arena.view import peek_in
from scarctl.state.version import pack
from tests.daemon.rig import copy_into, small_layout

pytestmark = pytest.mark.leaves_arena
RUN, LAYOUT, DEAD = "ab" * 16 + "-3", small_layout(), 0x7FFFFFF0
EVERYTHING = np.arange(LAYOUT.partitions)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    (tmp_path / "host").mkdir(mode=0o700)
    made = Arena.create(tmp_path / "host" / RUN, LAYOUT, run_id=RUN, epoch=1)
    made.take_over(DEAD)
    made.close()
    return made


def copy(arena: Arena, ids: np.ndarray, epoch: int, step: int) -> None:
    assert copy_into(arena, ids, pack(epoch, step), 0)
    arena.reach(step)


def age(arena: Arena) -> tuple[int, int, int] | None:
    return age_of(peek_in(arena.folder, RUN))


def test_a_later_epoch_comes_before_a_later_step_before_more_copies(arena: Arena) -> None:
    ages = []
    for ids, epoch, step in (
        (EVERYTHING, 1, 9),
        (EVERYTHING[:1], 1, 10),
        (EVERYTHING, 1, 10),
        (EVERYTHING, 2, 3),
    ):
        copy(arena, ids, epoch, step)
        ages.append(age(arena))
    assert ages == sorted(ages)
    assert len(set(ages)) == 4
    assert ages[-1] == (2, 3, 3 * EVERYTHING.size)


def test_only_copies_of_a_dead_process_have_an_age(arena: Arena) -> None:
    assert age(arena) is None
    copy(arena, EVERYTHING, 1, 4)
    assert age(arena) is not None
    arena.take_over()
    assert age(arena) is None
    assert age_of(None) is None
