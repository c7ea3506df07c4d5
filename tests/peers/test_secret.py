"""Test the file with the secret: its permissions, its content, and the keys derived from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scarctl.errors import AccessDenied, ScarError, UsageError
from scarctl.peers.handshake import SECRET_BYTES
from scarctl.peers.secret import fingerprint, read_secret, secret_of_start

CONTENT = b"planted-0123456789abcdef-0123456789abcdef"


def made(folder: Path, content: bytes = CONTENT, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_it_is_read_without_the_space_around_it(tmp_path: Path) -> None:
    assert read_secret(made(tmp_path, b"  " + CONTENT + b"\n")) == CONTENT
    os.symlink(made(tmp_path, mode=0o400), tmp_path / "link")
    assert read_secret(str(tmp_path / "link")) == CONTENT


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_one_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(AccessDenied, match="can be read by other users") as caught:
        read_secret(made(tmp_path, mode=mode))
    assert caught.value.kind == "peer-secret"
    assert "chmod 600" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 31 + b"\n", b"x" * 5000])
def test_one_of_another_size_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="32 to 4096 bytes"):
        read_secret(made(tmp_path, content))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises(ScarError) as caught:
            read_secret(str(path))
        assert caught.value.kind == "peer-secret"


def test_each_start_has_its_own(tmp_path: Path) -> None:
    first, second = (secret_of_start(CONTENT, start * 32) for start in "12")
    assert first != second
    assert len(bytes.fromhex(first)) == SECRET_BYTES
    assert secret_of_start(CONTENT, "1" * 32) == first != secret_of_start(CONTENT + b"x", "1" * 32)
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) not in first
