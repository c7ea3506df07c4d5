"""Test fits whose whole process is killed, asked to end, or interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.adapters.lightning.fits import Net, Point, differing, fit, kill, outcome
from tests.support.process import Forked, Tell

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SEALED = {"mode": "rollback"}
"""Continue from the newest whole state, because a kill may come in the middle of a copy."""


def kill_after_a_copy(point: Point) -> None:
    """End this process once the copy under way has ended, and the store has the one before."""
    time.sleep(1.0)
    kill(point)


@pytest.mark.leaves_arena
def test_a_killed_fit_ends_like_one_that_was_not(tmp_path: Path) -> None:
    """In a validation; the suite kills between iterations."""
    point = ("validation", 1, 1)
    whole, trainer = fit(Net, None)
    expected = outcome(whole, trainer)
    with Forked(lambda tell: fit(Net, tmp_path / "store", point, kill_after_a_copy)) as child:
        assert child.wait(60) == -signal.SIGKILL
    net, trainer = fit(Net, tmp_path / "store", callback=SEALED)
    assert trainer.callbacks[0].resumed.consistent
    assert (trainer.callbacks[0].resumed.step > 0) == (len(net.seen) < len(whole.seen))
    assert differing(outcome(net, trainer), expected) == []


@pytest.mark.leaves_arena
def test_what_lightning_does_with_sigterm_it_still_does(tmp_path: Path) -> None:
    """The fit ends its batch and raises, and the newest step is in the store."""
    store = tmp_path / "store"

    def train(tell: Tell) -> None:
        def then(_: Point) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        try:
            fit(Net, store, ("train", 1, 1), then)
        except BaseException as error:
            tell(type(error).__name__)
            raise
        tell("returned")

    with Forked(train) as child:
        child.expect("SIGTERMException", 60)
        assert child.wait(60) == 1
    whole, trainer = fit(Net, None)
    expected = outcome(whole, trainer)
    net, trainer = fit(Net, store)
    assert trainer.callbacks[0].resumed.consistent
    assert len(net.seen) == 4
    assert differing(outcome(net, trainer), expected) == []
