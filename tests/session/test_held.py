"""Test what a session does while a saver holds the slot that its next checkpoint would write."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scarctl.arena.slots import Hold
from scarctl.daemon.request import Request
from scarctl.errors import Unavailable
from scarctl.state.version import step_of
from tests.support.training import Loop, drained


@pytest.mark.parametrize("kind", ["partial", "full"])
@pytest.mark.parametrize("interval", [1, 1000])
def test_a_request_is_carried_out_once_the_saver_lets_go(tmp_path: Path, kind: str, interval: int) -> None:
    """Until then checkpoints are left out, regular and requested ones."""
    loop = Loop(tmp_path / "store", interval=interval)
    loop.train(1, settle=True)
    arena = loop.session._started().arena
    with arena.held(60.0):
        loop.session.checkpoint()  # from here on the held slot is the one to write
        loop.session._requests.add(Request(kind))
        loop.train(3)
        loop.session._saving.finish()
        assert step_of(arena.slot.head) == 1
    loop.train(1, settle=True)
    newest = arena.sealed if kind == "full" else int(arena.durable.max())
    loop.session.close()
    assert step_of(newest) == 5


def test_a_checkpoint_that_was_left_out_is_made_after_the_next_step(tmp_path: Path) -> None:
    """It does not wait for the next multiple of the interval."""
    loop = Loop(tmp_path / "store", interval=4)
    loop.train(1, settle=True)
    arena = loop.session._started().arena
    with arena.held(60.0):
        loop.session.checkpoint()
        loop.train(5)
        loop.session._saving.finish()
        assert step_of(arena.slot.head) == 1
    loop.train(1)
    loop.session._saving.finish()
    assert step_of(arena.slot.head) == 7
    loop.session.close()


@contextmanager
def held(loop: Loop) -> Iterator[Hold]:
    """Hold the slot with step 1, while the one with step 2 is current."""
    loop.train(1, settle=True)
    with loop.session._started().arena.held(60.0) as hold:
        loop.train(1)
        loop.session.checkpoint()
        yield hold


@pytest.mark.parametrize("full", [False, True])
def test_a_call_that_does_not_wait_is_carried_out_after_a_later_step(
    tmp_path: Path, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path / "store", interval=1000)
    with held(loop) as hold:
        loop.session.checkpoint(full=full)
        assert hold.lasts(), "calls in a row do not keep the saver from ending"
        loop.train(1)
    assert ("not saved as a whole: an earlier state" in caplog.text) == full
    loop.train(1, settle=True)
    arena = loop.session._started().arena
    assert step_of(arena.sealed if full else int(arena.durable.max())) == 4
    loop.session.close()


def test_calls_that_wait_do_so_until_the_saver_lets_go(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=1000)
    for call in (lambda: loop.session.checkpoint(full=True, wait=True), loop.session.flush):
        with held(loop) as hold:
            timer = threading.Timer(0.1, hold.end)
            timer.start()
            call()
            timer.join()
            assert step_of(loop.session._started().arena.slot.head) == loop.session.head_step
    loop.session.close()


def test_calls_that_wait_do_not_end_the_hold(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=1000, timeout=0.2)
    with held(loop) as hold:
        assert not loop.session.flush(0.1)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="an earlier state is still being read"):
            loop.session.checkpoint(full=True, wait=True)
        assert time.monotonic() - began >= 0.2
        assert hold.lasts()
        loop.session._saving.seal(loop.session._saving.take())
        assert not hold.lasts(), "as at the end of the process"
    drained([loop.session])
    loop.session.close()
