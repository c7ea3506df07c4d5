"""Test fits whose whole process is killed, asked to end, or interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.lazy import Lazy
from tests.support.process import Forked, Tell

if TYPE_CHECKING:
    from tests.adapters.lightning import fits
else:
    fits = Lazy("tests.adapters.lightning.fits")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.leaves_arena
def test_what_lightning_does_with_sigterm_it_still_does(tmp_path: Path) -> None:
    """The fit ends its batch and raises, and the newest step is in the store."""
    store = tmp_path / "store"

    def train(tell: Tell) -> None:
        def then(_: fits.Point) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        try:
            fits.fit(fits.Net, store, ("train", 1, 1), then)
        except BaseException as error:
            tell(type(error).__name__)
            raise
        tell("returned")

    with Forked(train) as child:
        child.expect("SIGTERMException", 60)
        assert child.wait(60) == 1
    whole, trainer = fits.fit(fits.Net, None)
    expected = fits.outcome(whole, trainer)
    net, trainer = fits.fit(fits.Net, store)
    assert trainer.callbacks[0].resumed.consistent
    assert len(net.seen) == 4
    assert fits.differing(fits.outcome(net, trainer), expected) == []
