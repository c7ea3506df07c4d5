"""Test that a replica keeps exact copies, whatever its owner's store has encoded."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.queue import HandOverQueue
from scarctl.state.version import pack
from tests.peers.test_replica import EVERYTHING, RUN, Run, equal

pytestmark = pytest.mark.leaves_arena


def test_a_replica_has_exact_copies_and_waiting_hand_overs_with_their_encoding(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    version = pack(1, run.step)
    run.queue.put(version=version, ids=EVERYTHING[:3], extras={"step": 1}, encoding="int8")
    run.queue.put(version=version, ids=EVERYTHING[3:], extras=None)
    run.arena.encoding_error[5] = 0.5  # of the owner's store, which the next owner reads itself
    assert run.send()
    assert equal(run)
    waiting = HandOverQueue(run.host / RUN).pending()
    assert [(one.encoding, one.ids.tolist()) for one in waiting] == [
        ("int8", EVERYTHING[:3].tolist()),
        ("exact", EVERYTHING[3:].tolist()),
    ]
    found = Arena.share(run.host / RUN, run_id=RUN)
    assert found is not None
    assert (found.encoding_error == -1).all()
