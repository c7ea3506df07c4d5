"""Test that requests from outside are carried out, whenever they arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import scarctl
from scarctl.arena.slot import Slot
from scarctl.daemon.request import Request
from scarctl.state.version import step_of
from tests.support.training import Loop, drained

pytestmark = pytest.mark.usefixtures("both_savers")


def test_a_request_that_comes_while_another_is_looked_at_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread makes a request, perhaps just when the requested copy begins."""
    loop = Loop(tmp_path / "store", interval=1000)
    loop.train(1)
    loop.session._saving.finish()
    drained([loop.session])
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
    loop.train(1)
    loop.session._saving.finish()
    drained([loop.session])
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


class Table:
    """A table of eight partitions, all of which change in every step, next to one that does not change."""

    def __init__(self, store: Path, fraction: float) -> None:
        self.x = np.zeros((8, 4))
        self.session = scarctl.attach(
            {"x": self.x, "kept": np.ones((8, 4))},
            store=store,
            interval=1000,
            fraction=fraction,
            partitioning=scarctl.Partitioning(rows={"*": 1}),
        )
        self.train(1)
        drained([self.session])
        self.engine = self.session._started()

    def train(self, steps: int) -> int:
        """Return the step of the newest copy."""
        for _ in range(steps):
            self.x += 1
            self.session.step()
            self.session._saving.finish()
        return step_of(int(self.session._started().arena.version.max()))


def test_a_request_is_fulfilled_while_all_that_changes_waits_for_the_store(tmp_path: Path) -> None:
    table = Table(tmp_path / "store", fraction=1.0)
    table.engine.saver.stop()
    table.train(1)
    table.session.checkpoint()
    arena = table.engine.arena
    assert arena.pending().sum() == len(table.x)
    table.session._requests.add(Request("partial"))
    assert table.train(2) == 3
    table.engine.start()
    assert table.engine.saver.drain(30.0)
    assert not arena.pending().any()
    table.session.close()


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
