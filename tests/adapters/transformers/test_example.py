"""Test that the example of a killed Trainer reports the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("usual_saver"), pytest.mark.long, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[3] / "examples" / "hf_finetune" / "train.py"


def test_lora_killed_and_run_again(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--store", str(tmp_path), "--lora", "--kill", "--steps", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^it had taken (\d+) steps and continued after step (\d+) ", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    taken, step = int(found[1]), int(found[2])
    assert 10 <= taken <= 16
    assert 1 <= step <= taken
    assert f"\n{taken - step} steps were taken again" in done.stdout
    losses = re.search(r"^loss at the end: ([\d.]+), undisturbed ([\d.]+)$", done.stdout, re.MULTILINE)
    assert losses is not None
