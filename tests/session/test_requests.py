"""Test that requests from outside are carried out, whenever they arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scarctl.daemon.request import Wish
from scarctl.state.version import step_of
from tests.support.training import Loop, drained

pytestmark = pytest.mark.usefixtures("both_savers")


def test_a_wish_that_comes_while_another_is_looked_at_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread makes a request, perhaps just when the session asks whether anything can be copied."""
    loop = Loop(tmp_path / "store", interval=1000)
    loop.train(1)
    loop.session._finish()
    drained([loop.session])
    arena, requests = loop.session._started().arena, loop.session._requests
    coming = [Wish("full")]
    look = arena.pending

    def pending() -> NDArray[np.bool_]:
        while coming:
            requests.add(coming.pop())
        return look()

    monkeypatch.setattr(arena, "pending", pending)
    requests.add(Wish("partial"))
    loop.train(2)
    loop.session._finish()
    drained([loop.session])
    newest = step_of(arena.sealed)
    loop.session.close()
    assert not coming
    assert newest > 1
