"""Test what a session does while a saver holds the slot that its next checkpoint would write."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.daemon.request import Request
from scarctl.state.version import step_of
from tests.support.training import Loop, drained


@pytest.mark.parametrize("kind", ["partial", "full"])
@pytest.mark.parametrize("interval", [1, 1000])
def test_a_request_is_carried_out_once_the_saver_lets_go(tmp_path: Path, kind: str, interval: int) -> None:
    """Until then checkpoints are left out, regular and requested ones."""
    loop = Loop(tmp_path / "store", interval=interval)
    loop.train(1)
    loop.session._saving.finish()
    drained([loop.session])
    arena = loop.session._started().arena
    with arena.held(60.0):
        loop.session.checkpoint()  # from here on the held slot is the one to write
        loop.session._requests.add(Request(kind))
        loop.train(3)
        loop.session._saving.finish()
        assert step_of(arena.slot.head) == 1
    loop.train(1)
    loop.session._saving.finish()
    drained([loop.session])
    newest = arena.sealed if kind == "full" else int(arena.durable.max())
    loop.session.close()
    assert step_of(newest) == 5


def test_a_checkpoint_that_was_left_out_is_made_after_the_next_step(tmp_path: Path) -> None:
    """It does not wait for the next multiple of the interval."""
    loop = Loop(tmp_path / "store", interval=4)
    loop.train(1)
    loop.session._saving.finish()
    drained([loop.session])
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
