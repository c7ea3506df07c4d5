"""Test that the example runs, is killed with -9, and continues."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optax", reason="optax is not installed here: `make frameworks`")

SCRIPT = Path(__file__).parents[3] / "examples" / "jax_recommender" / "train.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("usual_saver")
def test_the_example_is_killed_and_continues() -> None:
    command = [sys.executable, str(SCRIPT), "--kill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^killed after step 70; continued after step (\d+), (\w+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert 66 <= int(found[1]) < 120
    assert re.search(
        r"^in the end: step 120: loss [\d.]+; undisturbed: loss [\d.]+$", done.stdout, re.MULTILINE
    )
