"""Test that all hosts of a job have the same secret. `tests/peers/test_secret.py` has the file's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

import scarctl
from tests.distributed.jobs import build, step
from tests.distributed.launch import launch

CONTENT = "planted-0123456789abcdef-0123456789abcdef"


def train_with_own_secret(rank: int, world: int, folder: str) -> None:
    """Train with another secret on each rank."""
    own, home = Path(folder, f"secret-{rank}"), Path(folder, f"home-{rank}")
    home.mkdir()
    own.touch(0o600)
    own.write_text(f"{CONTENT}{rank}")
    model, optimizer = build("fsdp")
    settings = scarctl.Settings(peers=1, daemon=True, arena_dir=home, peer_secret_file=str(own))
    with scarctl.attach(model, optimizer, store=f"{folder}/store", settings=settings):
        step(model, optimizer, 1)


def test_hosts_with_different_secrets_are_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCARCTL_DAEMON")
    with pytest.raises(AssertionError) as caught:
        launch("tests.distributed.test_peer_secrets:train_with_own_secret", 2, str(tmp_path))
    said = "peer_secret_file is not the same on all ranks: rank 1 has another one than rank 0"
    assert said in str(caught.value)
    assert CONTENT not in str(caught.value)
