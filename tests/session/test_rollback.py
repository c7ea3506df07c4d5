"""Test a rollback in a running process to a state that the store does not have yet."""

from __future__ import annotations

from pathlib import Path

from tests.support.training import Loop, differing


def test_rollback_waits_for_a_sealed_state_that_is_on_its_way(tmp_path: Path, both_savers: str) -> None:
    """This includes the first seal: while it is written, the store has nothing complete."""
    loop = Loop(tmp_path / "store", interval=100)
    loop.train(3)
    # Like a slow store.
    loop.session._started().saver.stop()
    loop.session.checkpoint(full=True)
    sealed = loop.state()
    loop.train(4)
    report = loop.session.recover("all", mode="rollback")
    assert (report.consistent, report.step) == (True, 3)
    assert differing(loop.state(), sealed) == []
    loop.session.close()
