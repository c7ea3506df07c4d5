"""Test the exchange of two folders in one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.util import exchange as module
from scarctl.util.exchange import exchange


def test_two_folders_change_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    done = exchange(tmp_path / "a", tmp_path / "b")
    found = [(tmp_path / name / "file").read_text() for name in ("a", "b")]
    assert found == (["b", "a"] if done else ["a", "b"])


def test_a_missing_folder_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    try:
        assert not exchange(tmp_path / "a", tmp_path / "b"), "the file system cannot"
    except FileNotFoundError as error:
        assert error.filename2 == str(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_system_without_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RENAME", None)
    assert not exchange(tmp_path, tmp_path)
