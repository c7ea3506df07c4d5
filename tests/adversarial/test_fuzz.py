"""Run the short form of the fuzzing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_only_scarctls_own_errors_come_out() -> None:
    # In another process, because its memory is limited.
    command = [sys.executable, "-m", "tests.adversarial.fuzz", "--json", "--jobs", "1", "--cases", "300"]
    done = subprocess.run(
        [*command, "--seed", "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout)
    assert report["violations"] == []
    assert sum(report["cases"].values()) > 280
