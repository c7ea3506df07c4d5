"""Test what an arena notes of its store's lane, and its use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scarctl.arena.line import FILE, LineFile, Word, fit, noted
from scarctl.store.store import Found


def test_memory_belongs_to_what_its_term_has_saved(tmp_path: Path) -> None:
    line = LineFile(tmp_path, Word(7, 0, 5, 9))
    assert noted(tmp_path) == Word(7, 0, 5, 9)
    for found in (Found(5, 9), Found(7, 0), Found(7, 3)):
        assert fit(noted(tmp_path), found)
    for found in (Found(5, 10), Found(5, 8), Found(6, 9), Found(0, 0, frozenset((7,)))):
        assert not fit(noted(tmp_path), found)
    line.note(3)
    assert noted(tmp_path) == Word(7, 3)
    for found in (Found(7, 3), Found(7, 4)):
        assert fit(noted(tmp_path), found)
    for found in (Found(5, 9), Found(7, 2), Found(6, 3)):
        assert not fit(noted(tmp_path), found)


def test_of_a_store_without_a_record_memory_belongs_to_who_has_claimed_it(tmp_path: Path) -> None:
    empty = Found(0, 0, frozenset((3, 7)))
    for word, belongs in (
        (Word(7, 0), True),
        (Word(8, 0), False),  # of a store that was removed
        (Word(7, 1), False),
        (Word(7, 0, 5, 9), False),
    ):
        LineFile(tmp_path, word)
        assert fit(noted(tmp_path), empty) == belongs


def test_without_a_note_memory_fits_only_a_lane_that_nobody_has_claimed(tmp_path: Path) -> None:
    assert fit(None, None)
    assert not fit(None, Found(1, 1))
    assert not fit(Word(1, 1), None)


def test_a_new_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    old = LineFile(tmp_path, Word(1, 1))
    LineFile(tmp_path, Word(5, 5))
    old.note(9)
    assert noted(tmp_path) == Word(5, 5)


@pytest.mark.parametrize(
    "data",
    [b"", b"SCARterm", b"x" * 40, b"SCARterm" + (1 << 62).to_bytes(8, "little"), b"SCARterm" + bytes(9)],
)
def test_what_is_no_such_file_says_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    assert noted(tmp_path) is None


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    LineFile(tmp_path / "elsewhere", Word(1, 1))
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere" / FILE)
    assert noted(tmp_path) is None
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    assert noted(tmp_path) is None
