"""Test the lines of its store's logs that an arena notes, and their use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scarctl.arena.lines import FILE, Lines, fit, noted


def test_each_shard_is_at_one_of_two_lines(tmp_path: Path) -> None:
    lines = Lines(tmp_path, {3: 30, 1: 10})
    assert noted(tmp_path) == {1: (10, 10), 3: (30, 30)}
    lines.expect(1, 11)
    lines.expect(3, 31)
    lines.note(3, 31)
    assert noted(tmp_path) == {1: (10, 11), 3: (31, 31)}
    for first in (10, 11):
        assert fit(noted(tmp_path), {1: first, 3: 31})
    assert not fit(noted(tmp_path), {1: 10, 3: 30})
    assert not fit(noted(tmp_path), {1: 12, 3: 31})


def test_a_store_with_other_shards_does_not_fit(tmp_path: Path) -> None:
    Lines(tmp_path, {0: 1, 1: 2})
    assert not fit(noted(tmp_path), {0: 1})
    assert not fit(noted(tmp_path), {0: 1, 1: 2, 2: 3})
    assert not fit({}, {0: 1})


def test_a_new_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    old = Lines(tmp_path, {0: 1})
    Lines(tmp_path, {0: 5})
    old.note(0, 9)
    assert noted(tmp_path) == {0: (5, 5)}


@pytest.mark.parametrize(
    "data",
    [b"", b"SCARline", b"x" * 40, b"SCARline" + (1 << 62).to_bytes(8, "little"), b"SCARline" + bytes(9)],
)
def test_what_is_no_such_file_says_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    assert noted(tmp_path) == {}


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Lines(tmp_path / "elsewhere", {0: 1})
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere" / FILE)
    assert noted(tmp_path) == {}
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    assert noted(tmp_path) == {}
