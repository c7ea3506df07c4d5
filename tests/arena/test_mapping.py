"""Test the file of an arena: private, never behind a link, shared between its maps, and filled without a change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena.mapping import create_file, map_file, open_file, populate, write_at
from scarctl.errors import Corruption, ScarError


def test_a_new_file_is_private_and_replaces_what_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"old")
    path.chmod(0o666)
    old = os.open(path, os.O_RDONLY)
    fd = create_file(path)
    try:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert os.fstat(fd).st_size == 0
        assert os.pread(old, 3, 0) == b"old", "who still maps it is not disturbed"
    finally:
        os.close(fd)
        os.close(old)


def test_a_link_is_replaced_and_never_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "arena"
    target.write_bytes(b"precious")
    path.symlink_to(target)
    with pytest.raises(Corruption):
        open_file(path)
    os.close(create_file(path))
    assert target.read_bytes() == b"precious"
    assert not path.is_symlink()


def test_what_is_missing_or_no_plain_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "arena")
    with pytest.raises(ScarError):
        open_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    os.close(open_file(tmp_path / "pipe"))  # without waiting for its other end: the header is checked next


def test_two_maps_see_each_other_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    fd = create_file(path)
    os.ftruncate(fd, 8192)
    one, other = map_file(fd, 8192), map_file(fd, 8192, populate=False)
    one[4096:4100] = b"scar"
    assert other[4096:4100] == b"scar"
    write_at(fd, 8190, memoryview(b"ok"), path)
    assert one[8190:] == b"ok"
    os.close(fd)
    assert path.read_bytes()[4096:4100] == b"scar"
    one.close()
    other.close()


def test_filling_changes_no_byte(tmp_path: Path) -> None:
    fd = create_file(tmp_path / "arena")
    os.ftruncate(fd, 1 << 16)
    mapped = map_file(fd, 1 << 16, populate=False)
    data = np.frombuffer(mapped, np.uint8)
    data[::7] = 9
    before = data.copy()
    for part in (data, data[:0], data[5:6], data[4095:4097], data[60001:]):
        populate(part)
    assert np.array_equal(data, before)
    os.close(fd)


def test_a_write_without_room_says_so(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    fd = os.open("/dev/full", os.O_RDWR) if os.path.exists("/dev/full") else -1
    if fd < 0:
        pytest.skip("there is no /dev/full")
    with pytest.raises(ScarError, match="No space left"):
        write_at(fd, 0, memoryview(b"x"), path)
    os.close(fd)
