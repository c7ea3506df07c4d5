"""Test a seal that loses one of its copies while it waits for the store: it must not count as a state of one step."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from scarctl.cli.main import cli
from scarctl.errors import Unavailable
from scarctl.store import Store, sealed_sets
from tests.session.counting import Counting
from tests.support.process import Forked
from tests.support.training import drained


def seal_that_waits(run: Counting) -> None:
    """Make a state that is sealed and durable after 10 iterations, and sealed and waiting after 20."""
    run.train(10)
    run.session.checkpoint(full=True, wait=True)
    run.train(10)
    run.session._started().saver.stop()
    run.session.checkpoint(full=True)


def sealed_steps(store: Path) -> list[int]:
    opened = Store.open(store)
    try:
        return [one.step for one in sealed_sets(opened.states(opened.shards()).values())]
    finally:
        opened.close()


def test_a_repair_of_what_a_stopped_run_left_in_memory(
    tmp_path: Path, arena_dir: Path, warm_torch: None
) -> None:
    store = tmp_path / "store"

    def body(tell: Callable[[str], None]) -> None:
        run = Counting(store)
        seal_that_waits(run)
        tell("there")
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(body) as child:
        child.expect("there")
        assert child.wait() == -signal.SIGKILL
    arguments = ["recover", "--store", str(store), "--lost", "x[3:4]", "--arena-dir", str(arena_dir)]
    found = CliRunner().invoke(cli, arguments)
    assert found.exit_code == 0, found.output
    run = Counting(store)
    assert not run.session.resume(mode="partial").consistent
    assert run.x[:, 0].tolist() == [20, 20, 20, 10, 20, 20, 20, 20]
    drained([run.session])
    assert sealed_steps(store)[0] == 10
    run.session.close()


def test_a_rollback_that_failed_leaves_memory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read an older state by then, and the newest one still waits for the store."""
    run = Counting(tmp_path / "store", fraction=0.5)
    session = run.session
    seal_that_waits(run)
    engine = session._started()
    with monkeypatch.context() as patch:
        patch.setattr(engine.saver, "resume", lambda: None)
        patch.setattr(engine.saver, "drain", lambda timeout: False)
        patch.setattr(engine.saver, "roll_back", lambda seq: (_ for _ in ()).throw(Unavailable("away")))
        with pytest.raises(Unavailable):
            session.recover("all", mode="rollback")
    engine.saver.resume()
    drained([session])
    assert sealed_steps(tmp_path / "store")[0] == 20
    assert (run.x == 20).all()
    (tmp_path / "away").mkdir()
    other = Counting(shutil.copytree(tmp_path / "store", tmp_path / "copy"), arena_dir=tmp_path / "away")
    assert other.session.resume().step == 20
    other.session.close()
    run.session.close()


def test_a_seal_of_a_run_that_continues_from_memory_waits(tmp_path: Path, warm_torch: None) -> None:
    """Its requests do not get numbers that the earlier process's persister has served."""
    store = tmp_path / "store"

    def body(tell: Callable[[str], None]) -> None:
        run = Counting(store)
        for _ in range(5):
            run.train(1)
            run.session.checkpoint(full=True, wait=True)
        run.train(1)
        run.session._started().saver.stop()
        run.session.checkpoint()
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(body) as child:
        assert child.wait() == -signal.SIGKILL
    run = Counting(store)
    assert run.session.resume().step == 6
    drained([run.session])
    engine = run.session._started()
    engine.saver.stop()
    run.train(1)
    run.session.checkpoint(full=True)
    waits = engine.arena.wants_whole
    engine.start()
    drained([run.session])
    run.session.close()
    assert waits
