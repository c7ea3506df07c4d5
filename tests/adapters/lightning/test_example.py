"""Test that the example runs, and that its report on the killed training is true."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.distributed.launch import ROOT

pytestmark = pytest.mark.usefixtures("usual_saver")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.long
def test_the_example_is_killed_and_continues() -> None:
    script = ROOT / "examples" / "lightning_recommender" / "train.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kill", "--quick"], capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stdout + done.stderr
    died = re.search(r"killed at step (\d+), in the middle", done.stdout)
    again = re.search(r"continued after step (\d+): (\d+) of \d+ steps were made twice", done.stdout)
    assert died is not None
    assert again is not None
    assert int(died[1]) == 60
    assert int(again[1]) + int(again[2]) == 60
    assert f"resumed after step {again[1]} " in done.stdout
    assert "done: step 80, epoch 2" in done.stdout
