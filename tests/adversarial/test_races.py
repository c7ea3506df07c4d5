"""Run the short form of the races, and two commands in processes, one of which is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scarctl.store import Store, claim, verify
from scarctl.store.backends import remote_errors
from scarctl.store.backends.base import Blobs
from tests.adversarial import races

STOPPED_AT = """
import os, signal
from scarctl.cli.main import main
from scarctl.store.backends.local import LocalBlobs

original, done = LocalBlobs.create_exclusive, []

def create_exclusive(blobs, name, parts):
    done.append(name)
    if sum("/log/" in name for name in done) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    original(blobs, name, parts)

LocalBlobs.create_exclusive = create_exclusive
main()
"""
"""A checkpoint that stops itself right before the record of its first commit, when it has the lock and its term."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat requests with lost answers at once."""
    monkeypatch.setattr(remote_errors, "FIRST_PAUSE", 1e-4)


def test_races(capsys: pytest.CaptureFixture[str]) -> None:
    assert races.main(["--cases", "4000", "--step", "101", "--seconds", "3"]) == 0
    assert "0 violations" in capsys.readouterr().out


def test_a_process_that_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    """Another writer takes over meanwhile."""
    assert races.main(["--first", "6401", "--cases", "6402"]) == 0
    assert "processes stopped" in capsys.readouterr().out


def test_races_show_what_a_rule_is_good_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If an opening does not close the log before, stopped writers go on in it."""
    original = claim.put

    def put(blobs: Blobs, path: str, data: bytes, limit: int) -> bool:
        return b'"kind":"end"' in data or original(blobs, path, data, limit)

    monkeypatch.setattr(claim, "put", put)
    monkeypatch.setattr("scarctl.store.publish.look", lambda *_: None)
    assert races.main(["--first", "148", "--step", "96", "--cases", "341"]) == 1
    assert "Violated" in capsys.readouterr().err


def _checkpoint(state: Path, store: Path, step: int) -> list[str]:
    return ["checkpoint", str(state), "--store", str(store), "--step", str(step)]


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scarctl", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.timeout(400)  # five processes, each of which imports torch
@pytest.mark.long
def test_a_stopped_checkpoint_that_another_one_overtakes(tmp_path: Path) -> None:
    """With the lock the other process is kept out (exit code 11); without it, the first one is fenced (15)."""
    state, store = tmp_path / "state.safetensors", tmp_path / "run"
    save_file({"a": np.arange(64, dtype=np.float32)}, state)
    assert _run([*_checkpoint(state, store, 1), "--shards", "1"]).returncode == 0
    save_file({"a": np.arange(64, dtype=np.float32) + 1}, state)
    stopped = subprocess.Popen(
        [sys.executable, "-c", STOPPED_AT, *_checkpoint(state, store, 2)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        other = _run(_checkpoint(state, store, 3))
        assert other.returncode == 11
        assert f"process {stopped.pid} on" in other.stderr
        (store / "lock").unlink()
        assert _run(_checkpoint(state, store, 3)).returncode == 0
        os.kill(stopped.pid, signal.SIGCONT)
        _, errors = stopped.communicate(timeout=120)
    finally:
        stopped.kill()
        stopped.communicate()
    assert stopped.returncode == 15, errors
    assert "a newer writer has taken over" in errors
    opened = Store.open(store)
    assert opened.state(0).step == 3
    assert verify(opened, read_data=True).problems == []
