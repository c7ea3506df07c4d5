"""Run a short torture. `make torture` runs the long one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.adversarial.torture.episode import ROUNDS_PER_EPISODE
from tests.support import forkserver

ROUNDS, SECONDS = 4, 10


def torture(folder: Path, first: int) -> dict[str, Any]:
    """Play some rounds in another process: it forks trainers, so no thread may have been started in it."""
    numbers = {"seed": 1, "first": first, "rounds": first + ROUNDS, "seconds": SECONDS}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    command = ["-m", "tests.adversarial.torture", "--json", "--folder", str(folder), *options]
    done = forkserver.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_or_torn_whatever_is_killed(tmp_path: Path) -> None:
    # On a busy machine every process may be killed before it has saved anything: such rounds show nothing.
    for attempt in range(3):
        report = torture(tmp_path, attempt * ROUNDS_PER_EPISODE)
        assert report["failures"] == []
        if report["copies"]:
            return
    pytest.fail("no copy was saved and read back in any round")
