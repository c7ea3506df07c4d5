"""Test the secret of a job's hosts: it appears nowhere, a file of it must be private, and all hosts have the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.arena.folder import host_folder
from tests.daemon.trainer import stop
from tests.distributed.launch import launch

TRAIN = "tests.distributed.watched:train"
CONTENT = "planted-0123456789abcdef-0123456789abcdef"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("SCARCTL_DAEMON")
    yield tmp_path
    for home in ("east", "west"):
        stop(host_folder(str(tmp_path / home)))


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "secret"
    path.write_text(CONTENT + "\n")
    path.chmod(0o600)
    return path


def test_hosts_with_different_secrets_are_an_error_on_all(hosts: Path, secret: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        launch("tests.distributed.watched:train_with_own_secret", 2, str(hosts), str(secret))
    assert "peer_secret_file is not the same on all ranks: rank 1 has another one than rank 0" in str(
        caught.value
    )
    assert CONTENT not in str(caught.value)


def test_a_file_that_others_can_read_is_refused(hosts: Path, secret: Path) -> None:
    secret.chmod(0o640)
    with pytest.raises(AssertionError) as caught:
        launch(TRAIN, 2, str(hosts), {"peer_secret_file": str(secret)})
    assert "can be read by other users" in str(caught.value)
    assert CONTENT not in str(caught.value)
    assert not (hosts / "store").exists(), "nothing is written before"
