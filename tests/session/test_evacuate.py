"""Test a session that leaves its host: by a call, by SIGTERM with a grace period, with SIGKILL in the middle of it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import scarctl
from scarctl.errors import UsageError
from tests.support import stepper
from tests.support.process import Forked, Tell, end_by_signal
from tests.support.stored import stored_steps
from tests.support.throttled import ThrottledBlobs
from tests.support.training import Loop, differing

pytestmark = pytest.mark.usefixtures("warm_torch")
STEPS = 9


def throttle(session: scarctl.Session, bytes_per_second: float, **options: Any) -> ThrottledBlobs:
    """Slow down the store of a session without a daemon."""
    saver: Any = session._saver
    made = ThrottledBlobs(saver.store.blobs, bytes_per_second, **options)
    saver.store.blobs = made
    return made


def leave_host(arena_dir: Path) -> None:
    """Remove the host's memory."""
    for folder in arena_dir.glob("scarctl-*/*"):
        if folder.is_dir():
            shutil.rmtree(folder)


def test_all_that_fits_is_exact_on_another_host(tmp_path: Path, arena_dir: Path, both_savers: str) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(STEPS)
    found = loop.session.evacuate(60.0)
    assert found.safe
    assert found.sealed
    assert (found.step, found.lost_bytes, found.rework.iterations) == (STEPS, 0, 0.0)
    assert set(stored_steps(tmp_path / "store")) == {STEPS}
    state = loop.state()
    loop.session.close()
    leave_host(arena_dir)
    again = Loop(tmp_path / "store", seed=5)
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent) == (STEPS, True)
    assert differing(again.state(), state) == []
    again.session.close()


def test_checkpoints_rest_until_the_deadline_and_training_goes_on_after_a_false_alarm(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(STEPS)
    assert loop.session.evacuate(600.0).safe
    before = loop.session.stats.saved_bytes
    loop.train(5)
    assert loop.session.stats.saved_bytes == before
    loop.session._saving._opening.engine.pace.leave(0.0)  # type: ignore[union-attr]  # the deadline is over
    loop.train(4)
    loop.session.close()
    assert set(stored_steps(tmp_path / "store")) == {STEPS + 9}
    assert loop.session.stats.errors == 0


def test_a_call_before_the_first_step_and_nonsense_are_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    with pytest.raises(UsageError, match="first step"):
        loop.session.evacuate(5.0)
    loop.train(1)
    for seconds in (-1.0, float("nan"), float("inf"), "soon", None, True):
        with pytest.raises(UsageError, match="seconds"):
            loop.session.evacuate(seconds)  # type: ignore[arg-type]
    loop.session.close()


def test_the_distance_of_a_copy_from_the_stores_is_never_too_small(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=1, tracker="exact", daemon=False)
    loop.train(1)
    loop.session.checkpoint(full=True, wait=True)
    first = {name: value.clone() for name, value in loop.state().items() if name.endswith(("weight", "bias"))}
    throttled = throttle(loop.session, 1e12)
    throttled.stuck.set()
    loop.train(STEPS)
    found = loop.session.evacuate(0.0)
    now = {name: value for name, value in loop.state().items() if name in first}
    moved = [float((now[name] - first[name]).double().square().sum()) for name in now]
    assert found.squared is not None
    assert found.squared >= sum(moved) * (1 - 1e-5)
    throttled.stuck.clear()
    loop.session.close()


# -- SIGTERM with a grace period, SIGKILL: real processes, real signals ------------------------------------------------


def _training(store: Path, tell: Tell, *, grace: str, bytes_per_second: float) -> None:
    """Train some steps, slow the store down, and wait for signals."""
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(store), grace=grace, daemon=False)
    optimizer.step()
    session.checkpoint(full=True, wait=True)
    throttled = throttle(session, bytes_per_second)
    passing, creating = throttled.pass_through, throttled.create_exclusive

    def pass_through(nbytes: int, seconds: float = 0.0) -> None:
        tell("writing")
        passing(nbytes, seconds)

    def create_exclusive(name: str, parts: Any) -> None:
        creating(name, parts)
        tell("committed")

    throttled.pass_through = pass_through  # type: ignore[method-assign]
    throttled.create_exclusive = create_exclusive  # type: ignore[method-assign]
    for _ in range(STEPS):
        optimizer.step()
    tell("ready")
    while True:
        time.sleep(600)


@pytest.mark.leaves_arena
def test_sigterm_with_enough_grace_is_exact_on_another_host(tmp_path: Path, arena_dir: Path) -> None:
    store = tmp_path / "store"
    end_by_signal(lambda tell: _training(store, tell, grace="100s", bytes_per_second=1e9))
    assert set(stored_steps(store)) == {STEPS + 1}
    leave_host(arena_dir)
    assert stepper.resumed(store, "auto") == (STEPS + 1, True)


@pytest.mark.leaves_arena
@pytest.mark.parametrize("commits", [0, 2])
def test_sigkill_within_the_grace_period_leaves_what_was_committed(
    tmp_path: Path, arena_dir: Path, commits: int
) -> None:
    """The platform gives less time than announced."""
    store = tmp_path / "store"
    with Forked(lambda tell: _training(store, tell, grace="100s", bytes_per_second=2e6)) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        for _ in range(commits):
            child.expect("committed")
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    steps = stored_steps(store)
    assert steps.min() >= 1
    if commits:
        assert (steps > 1).any()
    leave_host(arena_dir)
    stepper.resumed(store, "auto")


@pytest.mark.leaves_arena
def test_ctrl_c_does_not_wait_for_the_store(tmp_path: Path) -> None:
    """The grace period is for the end of the machine."""

    def body(tell: Tell) -> None:
        try:
            _training(tmp_path / "store", tell, grace="100s", bytes_per_second=1e3)
        except KeyboardInterrupt:
            os._exit(7)

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGINT)
        assert child.wait(60) == 7
