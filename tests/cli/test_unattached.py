"""Test `scarctl run` with a command in which no session attaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.cli.run import _Unattached
from scarctl.daemon import client
from tests.cli.running import Running
from tests.daemon.trainer import Trainer


def test_a_command_that_attaches_nothing_is_warned_of(folder: Path, tmp_path: Path) -> None:
    """A command that fails has printed why, so nothing is added."""
    done = Running(tmp_path, "true").ends(0)
    assert done.stderr.startswith("scarctl: warning: true has ended, and no session has attached")
    assert Running(tmp_path, "false").ends(1).stderr == ""


def test_a_long_command_that_attaches_nothing_is_warned_of_while_it_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.hold(folder, 60)
    watch = _Unattached(folder, "train")
    watch.look("is running")
    watch.look("has ended")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scarctl: warning: train is running, and no session has attached")


def test_a_session_that_attaches_is_seen(
    folder: Path, arena_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.hold(folder, 60)
    watch = _Unattached(folder, "train")
    Trainer(tmp_path / "store", arena_dir).close()
    watch.look("has ended")
    assert capsys.readouterr().err == ""
