"""Test that requests from outside are carried out, whenever they arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import scarctl
from scarctl.arena.slot import Slot
from scarctl.daemon.request import Request
from scarctl.state.version import step_of
from tests.session.counting import Counting
from tests.support.training import Loop, drained

pytestmark = pytest.mark.usefixtures("both_savers")


def test_a_request_that_comes_while_another_is_looked_at_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread makes a request, perhaps just when the requested copy begins."""
    loop = Loop(tmp_path / "store", interval=1000)
    loop.train(1, settle=True)
    arena, requests = loop.session._started().arena, loop.session._requests
    coming = [Request("full")]
    begin = arena.begin_moment

    def begin_moment(*, flush: bool = False) -> tuple[Slot, int] | None:
        while coming:
            requests.add(coming.pop())
        return begin(flush=flush)

    monkeypatch.setattr(arena, "begin_moment", begin_moment)
    requests.add(Request("partial"))
    loop.train(2)
    loop.session._saving.finish()
    drained([loop.session])
    newest = step_of(arena.sealed)
    loop.session.close()
    assert not coming
    assert newest > 1


def test_a_request_that_comes_while_a_step_is_counted_waits_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has seen the step's number already, and waits for a newer one."""
    loop = Loop(tmp_path / "store", interval=1000)
    loop.train(1, settle=True)
    arena, requests = loop.session._started().arena, loop.session._requests
    coming, reach = [Request("partial")], arena.reach

    def reach_and_ask(step: int) -> None:
        reach(step)
        while coming:
            requests.add(coming.pop())

    monkeypatch.setattr(arena, "reach", reach_and_ask)
    loop.train(2)
    loop.session._saving.finish()
    drained([loop.session])
    newest = step_of(int(arena.durable.max()))
    loop.session.close()
    assert newest == 3


def test_a_request_is_fulfilled_while_all_that_changes_waits_for_the_store(tmp_path: Path) -> None:
    run = Counting(tmp_path / "store", daemon=None)
    run.train(1)
    drained([run.session])
    engine = run.session._started()
    engine.saver.stop()
    run.train(1)
    run.session.checkpoint()
    assert engine.arena.pending().sum() == len(run.x)
    run.session._requests.add(Request("partial"))
    run.train(2)
    assert step_of(engine.arena.version.max()) == 3
    engine.start()
    assert engine.saver.drain(30.0)
    assert not engine.arena.pending().any()
    run.session.close()


def test_a_request_is_not_repeated_for_a_partition_that_is_not_finite(tmp_path: Path) -> None:
    x = np.zeros((8, 4))
    with scarctl.attach({"x": x}, store=tmp_path / "store", interval=1000) as session:
        session.step()
        drained([session])
        x[:] = np.inf
        session._requests.add(Request("partial"))
        for _ in range(20):
            session.step()
        session._saving.finish()
        assert session.stats.checkpoints == 1, "memory keeps the state before"
        assert session.stats.nonfinite_partitions == 1
