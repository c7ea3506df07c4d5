"""Test rows that are set aside for the store: they are those of the moment, however scattered, or nothing is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena.arena import Arena
from scarctl.arena.staged import Rows, copy_out
from scarctl.errors import Corruption, Unavailable
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack
from tests.arena.arenas import ALL, LAYOUT, create
from tests.daemon.rig import fill

BASE = LAYOUT.base


@pytest.fixture
def arena(place: Path) -> Iterator[Arena]:
    """Yield an arena whose every byte differs from those next to it."""
    made = create(place)
    made.memory()[:] = np.arange(made.memory().size) % 251
    made.end(ALL, pack(1, 5))
    yield made
    made.remove()


@given(data=st.data())
def test_every_span_of_rows_is_as_it_was_in_the_arena(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Several groups, optimizer slots, scattered and adjacent partitions, a short last one, scalars, no rows."""
    ids = np.array(sorted(data.draw(st.sets(st.sampled_from(ALL.tolist())))), np.int64)
    arena = create(tmp_path_factory.mktemp("arena") / "a" / "b")
    arena.memory()[:] = np.arange(arena.memory().size) % 251
    arena.end(ALL, pack(1, 5))
    before = [[arena.rows(g, t).copy() for t in range(len(c.tensors))] for g, c in enumerate(LAYOUT.groups)]
    staged = copy_out(arena, ids)
    fill(arena, ALL, 99)
    rows = Rows(staged.path, LAYOUT, ids)
    for g, group in enumerate(LAYOUT.groups):
        mine = ids[(ids >= BASE[g]) & (ids < BASE[g + 1])]
        for first in range(mine.size):
            for some in (mine[first : last + 1] for last in range(first, mine.size)):
                starts, stops = LAYOUT.row_ranges(some)
                for t in range(len(group.tensors)):
                    found = np.frombuffer(rows(g, t, starts[0], stops[-1]), np.uint8)
                    found = found.reshape(stops[-1] - starts[0], -1)
                    for start, stop in zip(starts, stops, strict=True):
                        assert np.array_equal(
                            found[start - starts[0] : stop - starts[0]], before[g][t][start:stop]
                        )
        if mine.size:
            (start, *_), (stop, *_) = LAYOUT.row_ranges(mine[:1])
            inner = np.frombuffer(rows(g, 0, stop - 1, stop), np.uint8)
            assert np.array_equal(inner, before[g][0][stop - 1])
    arena.remove()
    staged.discard()


def test_scattered_rows_without_bytes(place: Path) -> None:
    specs = (TensorSpec("", "F32", (4, 1)), TensorSpec("m", "F32", (4, 0)))
    layout = build_layout([("w", "parameter", specs)], rows={"w": 1})
    arena = Arena.create(place, layout, run_id="0" * 32, epoch=1)
    staged = copy_out(arena, np.array([0, 3]))
    assert not Rows(staged.path, layout, staged.ids)(0, 1, 0, 4)
    staged.discard()
    arena.remove()


def test_it_says_what_the_arena_said(arena: Arena) -> None:
    arena.begin(ALL[3:4])
    arena.end(ALL[3:4], pack(1, 6))
    staged = copy_out(arena, ALL[2:4])
    arena.begin(ALL)
    arena.end(ALL, pack(1, 9))
    assert staged.versions.tolist() == [pack(1, 5), pack(1, 6)]
    assert (staged.generation < arena.generation[2:4]).all()
    assert staged.path.stat().st_mode & 0o777 == 0o600
    staged.discard()


@pytest.mark.parametrize("fails", ["posix_fallocate", "open"])
def test_without_room_nothing_is_left_behind(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = sorted(arena.folder.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(Unavailable) as caught:
            copy_out(arena, ALL)
    assert caught.value.kind == "arena-full"
    assert sorted(arena.folder.iterdir()) == before


@pytest.mark.parametrize("ids", [ALL[:4], ALL[:6], ALL[:0]], ids=len)
def test_a_file_of_another_size_is_corrupt(arena: Arena, ids: Any) -> None:
    staged = copy_out(arena, ALL[:5])
    with pytest.raises(Corruption, match="bytes, and its hand-over"):
        Rows(staged.path, LAYOUT, ids)
    staged.discard()
    with pytest.raises(FileNotFoundError):
        Rows(staged.path, LAYOUT, ids)
