"""Rehearse a program in places of the test's own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from scarctl.rehearse import processes
from scarctl.rehearse.rehearsal import Rehearsal, Rehearsed
from tests.support import forkserver

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep verdicts and the rehearsal's folder below the test's own; the program finds this tree's sources.

    Python programs are forked.
    """
    monkeypatch.setattr(processes, "subprocess", forkserver.Forks())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch's own, which stays
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "adapters"))))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("SCARCTL_OVERHEAD")


def rehearse(words: list[str], steps: int = 8, timeout: float = 240.0) -> tuple[Rehearsed, list[str]]:
    said: list[str] = []
    return Rehearsal(words, timeout, said.append).run(steps), said
