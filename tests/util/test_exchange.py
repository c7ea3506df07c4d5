"""Test that two paths are exchanged in one step, or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scarctl.util import exchange as module
from scarctl.util.exchange import exchange


def test_two_folders_are_exchanged(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    done = exchange(first, second)
    assert done or sys.platform != "linux"
    said = [(folder / "name").read_text() for folder in (first, second)]
    assert said == (["second", "first"] if done else ["first", "second"])


def test_a_missing_path_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    if module._RENAME is None:
        pytest.skip("this system cannot exchange paths")
    first = tmp_path / "first"
    first.write_text("there")
    with pytest.raises(FileNotFoundError, match="first"):
        exchange(first, tmp_path / "second")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_system_that_cannot_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RENAME", None)
    assert not exchange(tmp_path / "first", tmp_path / "second")
