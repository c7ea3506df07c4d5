"""Test fits whose whole process is killed, asked to end, or interrupted."""

from __future__ import annotations

import json
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
@pytest.mark.parametrize(
    "point",
    [("train", 0, 3), ("batch_end", 0, 5), ("validation", 1, 1), ("epoch_end", 1, 0)],
    ids=lambda point: "-".join(map(str, point)),
)
def test_a_killed_fit_ends_like_one_that_was_not(point: Point, tmp_path: Path) -> None:
    whole, trainer = fit(Net, None)
    expected = outcome(whole, trainer)
    with Forked(lambda tell: fit(Net, tmp_path / "store", point, kill_after_a_copy)) as child:
        assert child.wait(60) == -signal.SIGKILL
    net, trainer = fit(Net, tmp_path / "store", callback=SEALED)
    assert trainer.callbacks[0].resumed.consistent
    assert (trainer.callbacks[0].resumed.step > 0) == (len(net.seen) < len(whole.seen))
    assert differing(outcome(net, trainer), expected) == []


@pytest.mark.leaves_arena
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_what_lightning_does_with_a_signal_it_still_does(signum: int, tmp_path: Path) -> None:
    """The fit ends its batch and raises, and the newest step is in the store."""
    store = tmp_path / "store"

    def train(tell: Tell) -> None:
        def then(_: Point) -> None:
            os.kill(os.getpid(), signum)
            if signum == signal.SIGINT:
                time.sleep(20)  # it comes through when the newest step is saved, and ends this

        try:
            fit(Net, store, ("train", 1, 1), then)
        except BaseException as error:
            tell(type(error).__name__)
            raise
        tell("returned")

    with Forked(train) as child:
        if signum == signal.SIGTERM:
            child.expect("SIGTERMException", 60)
        # After an interrupt Lightning 2.2 returns from fit, and later versions exit.
        assert child.wait(60) in ([1] if signum == signal.SIGTERM else [0, 1])
    whole, trainer = fit(Net, None)
    expected = outcome(whole, trainer)
    net, trainer = fit(Net, store)
    assert trainer.callbacks[0].resumed.consistent
    assert len(net.seen) == (4 if signum == signal.SIGTERM else 6)
    assert differing(outcome(net, trainer), expected) == []


def test_a_killed_fit_with_partial_checkpoints_goes_on(tmp_path: Path) -> None:
    """Only the store gets a part. Memory is of one step, unless the kill came within a copy; so are the counters."""
    part = {"policy": "priority", "fraction": 0.25, "interval": 2}
    store = tmp_path / "store"
    with Forked(lambda tell: fit(Net, store, ("train", 1, 3), kill_after_a_copy, callback=part)) as child:
        assert child.wait(60) == -signal.SIGKILL
    net, trainer = fit(Net, store, callback=part)
    resumed = trainer.callbacks[0].resumed
    assert resumed.step > 0
    assert json.dumps(net.seen)  # it trained
    assert trainer.global_step == 6
    assert trainer.current_epoch == 2
    assert len(net.seen) == 12 - (2 * resumed.step)
