"""The example: a killed rank's rows go back, and all ranks continue."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed here: `make frameworks`")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("usual_saver")
def test_a_rank_of_the_example_is_killed() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "lost_rank.py")]
    command += ["torchtitan_llama", "--kill", "--quick", "--ranks", "2", "--steps", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"^lost 1 of 2 ranks \(1\); all ranks continue after step (\d+)$", done.stdout, re.MULTILINE
    )
    assert found is not None, done.stdout
    assert 20 <= int(found[1]) < 32
