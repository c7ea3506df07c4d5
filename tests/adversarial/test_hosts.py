"""Run the short form of the runs that move between hosts, and test a process that is stopped meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import scarctl
from tests.adversarial import host_lives, hosts
from tests.adversarial.host_lives import Plan, Violation
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def warm(arena_dir: Path) -> None:
    host_lives.warm()


@pytest.mark.parametrize(
    ("name", "daemon"), [*((name, "") for name in hosts.CASES), ("rollback elsewhere", "stays")]
)
def test_memory_of_another_line_is_no_memory(name: str, daemon: str) -> None:
    hosts.case(name, daemon)


@pytest.mark.parametrize("mutant", hosts.MUTANTS)
def test_the_rules_matter(mutant: str) -> None:
    for name in hosts.MUTANTS[mutant]:
        with pytest.raises(Violation), hosts.mutated(mutant):
            hosts.case(name)


def test_at_random() -> None:
    counts = sum((hosts.episode(seed, daemons=False) for seed in range(2)), start=hosts.Counter[str]())
    assert counts["from memory"]
    assert counts["memory of another line"]


def test_a_pruned_copy_of_a_store_is_the_same_state() -> None:
    """A restored copy was pruned, so the record that names its state is gone. Memory of that state counts."""
    assert hosts.episode(70022)["from memory"]


def test_who_was_stopped_while_the_run_was_rolled_back_elsewhere_is_fenced(tmp_path: Path) -> None:
    """Its daemon is dead and nothing was saved, so there is only the roll-back."""
    here, elsewhere = tmp_path / "a", tmp_path / "b"
    here.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o700)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _stop_and_go_on(tmp_path / "run", here, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        os.waitpid(pid, os.WUNTRACED)
        host_lives.kill_daemon(here)
        assert host_lives.live(tmp_path / "run", elsewhere, 2, Plan("rollback", steps=0)).step == 3
        before = hosts.stored(tmp_path / "run")
    finally:
        os.kill(pid, signal.SIGCONT)
        with os.fdopen(reading) as pipe:
            told = json.loads(pipe.read())
        os.waitpid(pid, 0)
        host_lives.kill_daemon(here)
    assert told["failure"] == "fenced"
    assert told["errors"] > 0
    assert hosts.stored(tmp_path / "run") == before


def _stop_and_go_on(store: Path, arenas: Path, pipe: int) -> None:
    state = {name: np.zeros(shape) for name, shape in host_lives.SHAPES.items()}
    session = scarctl.attach(
        state,
        store=store,
        settings=scarctl.Settings(arena_dir=arenas, daemon=True),
        interval=1,
        partitioning=scarctl.Partitioning(rows={"*": 1}, shards=2, seed=3),
    )

    def step() -> None:
        for array in state.values():
            array += 1
        session.step()

    for n in range(6):
        step()
        if n == 2:
            session.checkpoint(full=True, wait=True)
    session._saving.finish()
    assert session._engine is not None
    assert session._engine.saver.drain(20)
    os.kill(os.getpid(), signal.SIGSTOP)
    wait_until(lambda: session._engine.saver.failure)
    for _ in range(3):
        step()
    failure = session._engine.saver.failure
    os.write(pipe, json.dumps({"failure": failure and failure.kind, "errors": session.stats.errors}).encode())
    os.kill(os.getpid(), signal.SIGKILL)
