"""A short torture. `make torture` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 4


@pytest.mark.slow
def test_nothing_is_lost_or_torn_whatever_is_killed(tmp_path: Path) -> None:
    # A process of its own: it forks trainers, and nothing in it may have started threads before.
    command = [sys.executable, "-m", "tests.adversarial.torture", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--rounds", "1000", "--seconds", str(SECONDS), "--seed", "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["rounds"] >= 2
    assert report["copies"] > 0
