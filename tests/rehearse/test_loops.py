"""Rehearse every program of `tests.rehearse.loops`: each ends as it would have without a signal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.rehearse.conftest import rehearse
from tests.rehearse.loops import PER_EPOCH, PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_places")]


@pytest.mark.long
@pytest.mark.parametrize("stop", [PER_EPOCH, PER_EPOCH + 2], ids=["last step of an epoch", "within an epoch"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_it_would_have(tmp_path: Path, name: str, stop: int) -> None:
    words = [sys.executable, "-m", "tests.rehearse.loops", name, str(tmp_path / "store")]
    found, said = rehearse(words, 2 * stop)
    assert found.verdict == "identical", (found, said)
    assert all(run.resumed for run in found.runs[1:])
