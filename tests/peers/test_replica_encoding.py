"""Test that a replica keeps exact copies, whatever its owner's store has encoded."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.arena.arena import Arena
from tests.peers.test_replica import EVERYTHING, RUN, Run, equal

pytestmark = pytest.mark.leaves_arena


def test_a_replica_has_exact_copies(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    run.arena.encoding_error[5] = 0.5  # of the owner's store, which the next owner reads itself
    assert run.send()
    assert equal(run)
    found = Arena.share(run.host / RUN, run_id=RUN)
    assert found is not None
    assert (found.encoding_error == -1).all()
