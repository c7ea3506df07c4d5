"""Test an arena of the former format, without errors of encoded copies: read, converted, mapped up to its end."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena import header
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.arena.header import Geometry
from scarctl.arena.view import peek
from scarctl.errors import Corruption, Unavailable
from scarctl.state.version import pack
from tests.arena.arenas import ALL, LAYOUT, create, left_behind, reopen
from tests.daemon.rig import STORE_ID


def former(place: Path) -> tuple[Path, bytes]:
    """Return an arena of a dead run in the former format, and the bytes of its tensors."""
    file = left_behind(place)
    arena = reopen(place)
    assert arena is not None
    arena.acknowledge(ALL[::2], pack(1, 9))
    tensors, end = arena.memory().tobytes(), arena._geometry.errors_at
    arena.close()
    data = bytearray(file.read_bytes()[:end])
    struct.pack_into("<IIQ", data, 8, 1, 4096, end)
    file.write_bytes(data)
    return file, tensors


@pytest.mark.parametrize("cut", [False, True])
def test_copies_of_the_former_format_are_not_lost(place: Path, cut: bool) -> None:
    """`cut`: an earlier process was killed while it converted the file."""
    file, tensors = former(place)
    if cut:
        data = file.read_bytes()
        geometry = Geometry(LAYOUT, data[4096 : 4096 + struct.unpack_from("<Q", data, 40)[0]])
        with file.open("r+b") as old:
            old.truncate(geometry.size)
    arena = reopen(place)
    assert arena is not None
    assert (arena.version == pack(1, 9)).all()
    assert arena.pending().tolist() == [i % 2 == 1 for i in ALL.tolist()]
    assert arena.intact().all()
    assert (arena.encoding_error == -1).all()
    assert arena.memory().tobytes() == tensors
    arena.encoding_error[1] = 2.0
    arena.close()
    assert struct.unpack_from("<I", file.read_bytes(), 8) == (2,)
    again = reopen(place)
    assert again is not None
    assert again.encoding_error[1] == 2.0
    again.close()


def test_an_arena_of_the_former_format_is_shown_and_not_shared(tmp_path: Path) -> None:
    place = arena_folder(str(tmp_path), STORE_ID)
    file, _ = former(place)
    before = file.read_bytes()
    with pytest.raises(Corruption, match="format 1"):
        Arena.share(place, run_id=STORE_ID)
    view = peek(str(tmp_path), STORE_ID)
    assert view is not None
    assert (view.version == pack(1, 9)).all()
    assert view.pending == LAYOUT.partitions // 2
    assert file.read_bytes() == before


def test_a_file_of_the_former_format_that_is_too_short_is_refused(place: Path) -> None:
    file, _ = former(place)
    data = file.read_bytes()
    for other in (data[:-1], data + b"x"):
        file.write_bytes(other)
        with pytest.raises(Corruption, match="size"):
            reopen(place)
        assert file.read_bytes() == other


def test_without_room_the_former_arena_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensors = former(place)
    before = file.read_bytes()

    def full(fd: int, size: int, folder: Path) -> None:
        raise Unavailable("no room", kind="arena-full")

    with monkeypatch.context() as patched:
        patched.setattr(header, "reserve", full)
        with pytest.raises(Unavailable):
            reopen(place)
    assert file.read_bytes() == before
    arena = reopen(place)
    assert arena is not None
    assert arena.memory().tobytes() == tensors
    arena.close()


def test_errors_of_a_new_arena_say_that_all_is_exact(place: Path) -> None:
    arena = create(place)
    assert np.array_equal(arena.encoding_error, np.full(LAYOUT.partitions, -1.0))
    arena.close()
