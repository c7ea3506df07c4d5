"""Run a short torture. `make torture` runs the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adversarial.torture.episode import ROUNDS_PER_EPISODE

ROOT = Path(__file__).parents[2]
ROUNDS, SECONDS = 4, 10


def torture(folder: Path, first: int) -> dict[str, Any]:
    """Play some rounds in another process: it forks trainers, so no thread may have been started in it."""
    command = [
        sys.executable,
        "-m",
        "tests.adversarial.torture",
        "--json",
        "--folder",
        str(folder),
        "--seed",
        "1",
    ]
    done = subprocess.run(
        [*command, "--first", str(first), "--rounds", str(first + ROUNDS), "--seconds", str(SECONDS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_or_torn_whatever_is_killed(tmp_path: Path) -> None:
    # On a busy machine every process may be killed before it has saved anything: such rounds show nothing.
    for attempt in range(3):
        report = torture(tmp_path, attempt * ROUNDS_PER_EPISODE)
        assert report["failures"] == []
        if report["copies"]:
            return
    pytest.fail("no copy was saved and read back in any round")
