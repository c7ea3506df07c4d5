"""Test the file `scarctl.toml`: read if it belongs to this user, and never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scarctl.config.file import FILE_NAME, MAX_FILE_BYTES, read_file, storage_options
from scarctl.errors import UsageError


def test_its_content_or_nothing(tmp_path: Path) -> None:
    assert read_file(tmp_path) == {}
    (tmp_path / FILE_NAME).write_text('store = "ckpt"\n[inspect]\nlimit = 5\n')
    assert read_file(tmp_path) == {"store": "ckpt", "inspect": {"limit": 5}}


def test_one_that_others_may_write_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE_NAME
    path.write_text('store = "planted"\n')
    path.chmod(0o666)
    assert read_file(tmp_path) == read_file(tmp_path) == {}
    (record,) = caplog.records
    assert f"{path} is ignored" in record.getMessage()


@pytest.mark.parametrize("content", [b"store =", b"\xff", b"a = " + b"1" * 5000, b"a = " + b"[" * 5000])
def test_what_is_not_toml(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(UsageError, match="is not TOML"):
        read_file(tmp_path)


def test_a_very_large_one_is_not_read(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(UsageError, match="larger than"):
        read_file(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"#" * MAX_FILE_BYTES)
    assert read_file(tmp_path) == {}


def test_a_pipe_or_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME, 0o600)
    assert read_file(tmp_path) == {}
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        read_file(tmp_path)


def test_storage_options_are_a_table() -> None:
    assert storage_options({}) is None
    assert storage_options({"storage_options": {"key": "x"}}) == {"key": "x"}
    for wrong in ("planted", [1], 5):
        with pytest.raises(UsageError) as caught:
            storage_options({"storage_options": wrong})
        assert "planted" not in str(caught.value)
