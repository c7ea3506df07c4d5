"""Test that the embedding example runs, and that its claims about its experiment are true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("usual_saver")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.long
def test_all_ways_see_the_same_losses(tmp_path: Path) -> None:
    # The test waits a hundred times until all is durable: in memory that takes no time.
    memory = Path("/dev/shm")
    command = [sys.executable, "-W", "error", "-m", "examples.embedding.compare"]
    done = subprocess.run(
        [*command, "--seeds", "1", "--words", "300", "--batch", "32"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(memory if memory.is_dir() else tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seed = re.search(
        r"^seed 0, lost after iteration (\d+): full [+-]\d+, .*; rollback: full ([+-]\d+), changed ([+-]\d+)$",
        done.stdout,
        re.MULTILINE,
    )
    assert seed is not None, done.stdout
    # A rollback is exact: it costs the iterations since the last full checkpoint, neither more nor fewer.
    after = int(seed[1])
    assert (int(seed[2]), int(seed[3])) == (after % 80, after % 40)
    rows = re.findall(r"^(\w+) +(\d+) +([\d.]+) MB +\S+ \(([\d.]+)x\)", done.stdout, re.MULTILINE)
    assert [(name, every) for name, every, _, _ in rows] == [
        ("full", "80"), ("changed", "40"), ("random", "10"), ("round", "10"), ("priority", "10")
    ]  # fmt: skip
    assert float(rows[-1][3]) < 1
