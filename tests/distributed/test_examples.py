"""Test that the examples of several ranks run, and that their reports on a killed rank are true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("usual_saver"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "lost_rank.py"
STEPS = {"fsdp_transformer": 32, "moe": 64}


def lost_rank(example: str, *arguments: str) -> str:
    """Run the example, check what both examples print, and return the output."""
    steps = STEPS[example]
    command = [sys.executable, str(SCRIPT), example, *arguments, "--kill", "--quick"]
    command += ["--ranks", "2", "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout
    found = re.search(r"^lost 1 of 2 ranks \(1\); all ranks continue after step (\d+)$", output, re.MULTILINE)
    assert found is not None, output
    step = int(found[1])
    assert steps * 5 // 8 <= step < steps
    assert re.search(rf"^0 +[1-9]\d* +0 +[\d.]+  {step}$", output, re.MULTILINE), output
    # The first checkpoint saves everything. It may still be on its way to the store.
    assert f"{step - 1:>2} steps  to the first:" in output or f"{step:>2} steps  to the start:" in output
    assert re.search(rf"^step {step + 1} +\d", output, re.MULTILINE)
    parts = [float(found) for found in re.findall(r"^ +([\d.]+) s  ", output, re.MULTILINE)]
    assert sum(parts[:3]) == pytest.approx(parts[3], abs=0.03)
    return output


def test_the_memory_of_a_killed_rank_is_there() -> None:
    output = lost_rank("moe")
    # The age of its copies depends on the daemon's speed: until the first is durable there is no second one.
    found = re.search(
        r"^1 lost +(\d+) +(\d+) +[\d.]+  (\d+) to (\d+): up to (\d+) steps old$", output, re.MULTILINE
    )
    assert found is not None, output
    memory, store, oldest, newest, age = map(int, found.groups())
    assert store < 0.1 * memory, "what was being copied when the rank was killed"
    head = re.search(r"all ranks continue after step (\d+)$", output, re.MULTILINE)
    assert head is not None
    assert 1 <= oldest <= newest <= int(head[1]) == oldest + age
    assert re.search(r"^experts' shares of the work before: 0: ", output, re.MULTILINE)


def test_a_host_that_is_gone_comes_back_from_the_store() -> None:
    output = lost_rank("fsdp_transformer", "--host")
    assert re.search(r"^1 lost +0 +[1-9]\d* ", output, re.MULTILINE), output
