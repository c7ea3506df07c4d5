"""Test a rollback in a running process: its target, and the steps that it discards."""

from __future__ import annotations

from pathlib import Path

from tests.support.training import Loop, differing, drained


def test_rollback_goes_back_to_the_newest_sealed_state_with_its_extras(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=5, policy="full")
    loop.train(10, settle=True)
    sealed = loop.state()
    loop.train(4, settle=True)
    drained([loop.session])
    report = loop.session.recover(lost="all", mode="rollback")
    assert (report.mode, report.consistent, report.step) == ("rollback", True, 10)
    assert differing(loop.state(), sealed) == []
    assert loop.session.head_step == 10
    assert loop.position == {"batches": 10}
    loop.train(2, settle=True)
    loop.session.close()
    # States saved before the rollback, and later than its target, are never seen again.
    again = Loop(tmp_path / "store", interval=5, policy="full")
    assert again.session.resume().step == 12
    again.session.close()


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
