"""Test that no arena is mapped that is damaged, foreign, or in a place where others may write."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena import header
from scarctl.errors import AccessDenied, Corruption
from tests.arena.arenas import LAYOUT, create, left_behind, reopen
from tests.daemon.rig import STORE_ID


def at(offset: int, form: str, *new: Any) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, offset, *new)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(at(0, "<8s", b"ELF"), "header is not valid", id="magic"),
        pytest.param(at(8, "<I", 2), "format 2", id="older-format"),
        pytest.param(at(8, "<I", 6), "format 6", id="newer-format"),
        pytest.param(at(12, "<I", 512), "header is not valid", id="header-size"),
        pytest.param(at(16, "<Q", 1 << 62), "size", id="file-size"),
        pytest.param(at(24, "<Q", 1 << 40), "does not fit", id="partitions"),
        pytest.param(at(32, "<Q", 0), "header is not valid", id="json-at"),
        pytest.param(at(40, "<Q", 1 << 62), "size", id="json-size"),
        pytest.param(at(40, "<Q", 10), "layout cannot be read", id="json-too-short"),
        pytest.param(at(48, "<Q", 0), "does not fit", id="arrays-at"),
        pytest.param(at(56, "<Q", 1 << 50), "does not fit", id="tensors-at"),
        pytest.param(at(64, "<32s", b"x" * 32), "does not fit", id="layout-digest"),
        pytest.param(at(96, "<16s", b"x" * 16), "another store", id="store"),
        pytest.param(at(256, "<q", 1 << 24), "counters are impossible", id="epoch"),
        pytest.param(at(264, "<q", 1 << 40), "counters are impossible", id="head-step"),
        pytest.param(at(272, "<q", 1 << 31), "counters are impossible", id="process"),
        pytest.param(at(280, "<q", -2), "counters are impossible", id="sealed"),
        pytest.param(at(296, "<q", -1), "counters are impossible", id="base-epoch"),
        pytest.param(at(4096, "<4s", b"\0\0\0\0"), "layout cannot be read", id="json-zeros"),
        pytest.param(at(4096, "<6s", b"[[[[[["), "layout cannot be read", id="json-nested"),
        pytest.param(lambda data: data.__delitem__(slice(4000, None)), "size", id="truncated"),
        pytest.param(lambda data: data.__delitem__(slice(20, None)), "too short", id="cut-in-header"),
        pytest.param(lambda data: data.clear(), "too short", id="empty"),
        pytest.param(lambda data: data.extend(b"more"), "size", id="longer"),
    ],
)
def test_damaged_headers(place: Path, damage: Callable[[bytearray], None], message: str) -> None:
    file = left_behind(place)
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    with pytest.raises(Corruption, match=message) as caught:
        reopen(place)
    assert str(file) in str(caught.value)
    with pytest.raises(Corruption):
        reopen(place)  # and not Contention: the lock was released
    assert file.read_bytes() == bytes(data)


@given(flips=st.lists(st.tuples(st.integers(0, 128 + 700), st.integers(1, 255)), min_size=1, max_size=4))
def test_random_damage_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, flips: list[Any]
) -> None:
    place = tmp_path_factory.mktemp("damage") / "a" / STORE_ID
    file = left_behind(place)
    data = bytearray(file.read_bytes())
    for offset, mask in flips:
        data[offset if offset < 128 else 4096 + offset - 128] ^= mask
    file.write_bytes(data)
    arena = None
    with contextlib.suppress(Corruption):
        arena = reopen(place)
    if arena is not None:
        assert arena.layout == LAYOUT
        arena.remove()


def test_a_pipe_is_not_waited_for(place: Path) -> None:
    """`test_mapping.py` has links and folders in the file's place."""
    file = left_behind(place)
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(AccessDenied):
        reopen(place)


def others_may_enter(path: Path) -> None:
    path.chmod(0o755 if path.is_dir() else 0o606)


def given_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


def linked(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
anothers = pytest.param(given_away, marks=root)


@pytest.mark.parametrize("spoil", [others_may_enter, anothers])
def test_a_file_that_is_not_this_users_alone(place: Path, spoil: Callable[[Path], None]) -> None:
    spoil(left_behind(place))
    with pytest.raises(AccessDenied, match="private"):
        reopen(place)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("spoil", [others_may_enter, linked, anothers])
def test_a_folder_that_is_not_this_users_alone(
    place: Path, spoil: Callable[[Path], None], level: int
) -> None:
    """Its parent, too: in a folder for all users, another one may take the name of a victim's future arena."""
    left_behind(place)
    spoil(place if level == 0 else place.parent)
    for attempt in (reopen, create):
        with pytest.raises(AccessDenied, match="0700"):
            attempt(place)


def test_an_arena_from_before_the_machines_last_start(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a disk it survives a restart, but pages were written in any order: even complete moments prove nothing."""
    file = left_behind(place)
    (place / "extras-0.safetensors").touch()
    boot = tmp_path / "boot"
    boot.write_text("11111111-2222-3333-4444-555555555555\n")
    monkeypatch.setattr(header, "_BOOT_ID", boot)
    assert reopen(place) is None
    assert "last boot" in caplog.text
    assert not file.exists()
    assert list(place.iterdir()) == []
    create(place).remove()
