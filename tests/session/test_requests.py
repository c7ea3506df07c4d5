"""What a session is asked for from outside is done, whenever it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.arena.queue import HandOverQueue
from scarctl.daemon.request import Wish
from scarctl.state.version import step_of
from tests.support.training import Loop, drained

pytestmark = pytest.mark.usefixtures("both_savers")


def test_a_wish_that_comes_while_another_is_looked_at_is_kept(tmp_path: Path) -> None:
    """Another thread takes wishes in. It may do so just when the queue's folder is listed."""
    loop = Loop(tmp_path / "store", interval=1000)
    loop.train(1)
    loop.session._finish()
    drained([loop.session])
    engine, requests = loop.session._started(), loop.session._requests

    class Listed(HandOverQueue):
        def numbers(self) -> list[int]:
            requests.add(Wish("full"))
            return super().numbers()

    queue, engine.queue = engine.queue, Listed(engine.arena.folder)
    requests.add(Wish("partial"))
    loop.train(1)
    engine.queue = queue
    loop.train(1)
    loop.session._finish()
    drained([loop.session])
    newest = step_of(engine.arena.sealed)
    loop.session.close()
    assert newest > 1
