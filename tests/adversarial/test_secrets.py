"""Run the short form of the search for secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_secret_shows() -> None:
    # In another process, because it changes the environment, and starts a server and a daemon.
    command = [sys.executable, "-m", "tests.adversarial.secrets", "--cases", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
