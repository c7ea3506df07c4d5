"""Kill training at random, and check its memory. `make attack` does so for long."""

from __future__ import annotations

import pytest

from tests.support import forkserver


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_has_one_step_after_each_kill() -> None:
    done = forkserver.run(["-m", "tests.adversarial.kills", "--rounds", "16"], timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("; 0 violations\n")
