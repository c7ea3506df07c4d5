"""Run the short form of the fuzzing."""

from __future__ import annotations

import json
import os

import pytest

from tests.support import forkserver


@pytest.mark.slow
def test_only_scarctls_own_errors_come_out() -> None:
    # In another process, because its memory is limited.
    command = ["-m", "tests.adversarial.fuzz", "--json", "--jobs", "1", "--cases", "300", "--seed", "1"]
    done = forkserver.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout)
    assert report["violations"] == []
    assert sum(report["cases"].values()) > 280
