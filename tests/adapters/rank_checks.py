"""Check what jobs of two ranks report, under every framework that has an environment of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.distributed.launch import ROOT, launch


def check_halves(jobs: str, folder: Path, kinds: list[Any], *, timeout: float) -> Iterator[tuple[Any, Any]]:
    """Check that each resumed run ends bit for bit like the undisturbed one. Yield the reports of both."""
    for of_rank in launch(f"{jobs}:undisturbed", 2, str(folder), kinds, timeout=timeout):
        for kind, (whole, resumed) in zip(kinds, of_rank, strict=True):
            assert (resumed["step"], resumed["head"]) == (4, 8), kind
            assert resumed["consistent"], (kind, resumed["reasons"])
            assert resumed["last"] == whole["last"] != whole["first"], kind
            assert not resumed["warnings"], kind
            yield whole, resumed


def lost_rank(workload: str, steps: int, *options: str) -> tuple[int, str]:
    """Run the example of a killed rank. Return the step after which all ranks continue, and the output."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "lost_rank.py"), workload]
    command += ["--kill", "--quick", "--ranks", "2", "--steps", str(steps), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"^lost 1 of 2 ranks \(1\); all ranks continue after step (\d+)$", done.stdout, re.MULTILINE
    )
    assert found is not None, done.stdout
    return int(found[1]), done.stdout
