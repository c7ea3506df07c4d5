"""Run the short form of the search for secrets."""

from __future__ import annotations

import pytest

from tests.support import forkserver


@pytest.mark.slow
def test_no_secret_shows() -> None:
    # In another process, because it changes the environment, and starts a server and a daemon.
    done = forkserver.run(["-m", "tests.adversarial.secrets", "--cases", "1"], timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
