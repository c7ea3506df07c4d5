"""Test that a resumed state's own description stays true, however often a run is killed and resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scarctl.checkpoint.copied import Copied
from scarctl.checkpoint.engine import Engine
from tests.support import stepper
from tests.support.process import Forked, Tell


@pytest.mark.usefixtures("both_savers")
@pytest.mark.parametrize("mode", ["partial", "auto"])
def test_copies_newer_than_their_extras_never_pass_for_exact(tmp_path: Path, mode: str) -> None:
    """Copies were made, but their process died before it could note the step of random numbers and schedules."""
    store = str(tmp_path / "store")

    def dies_before_it_hands_over(tell: Tell) -> None:
        model, optimizer = stepper.build()
        session = stepper.attach(model, optimizer, store)
        for step in range(1, 7):  # memory gets a copy of the last one
            optimizer.step()
            if step == 4:
                session.checkpoint(full=True, wait=True)

        def die(engine: Engine, copied: Copied, extras: Any, whole: str) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        Engine.hand_over = die  # type: ignore[method-assign]
        optimizer.step()

    def resumes_and_dies(tell: Tell) -> None:
        model, optimizer = stepper.build()
        resumed = stepper.attach(model, optimizer, store).resume(mode="partial")
        values = sorted({int(v) for p in model.parameters() for v in p[:, 0]})
        tell(f"{resumed.step} {resumed.exact} {values}")
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(dies_before_it_hands_over) as child:
        assert child.wait() == -signal.SIGKILL
    if mode == "auto":  # the state of the extras' step is in the store
        model, optimizer = stepper.build()
        with stepper.attach(model, optimizer, store) as session:
            resumed = session.resume()
            assert (resumed.step, resumed.exact) == (4, True)
            assert {int(v) for p in model.parameters() for v in p[:, 0]} == {4}
        return
    for _ in range(3):
        with Forked(resumes_and_dies) as child:
            child.expect("4 False [6]")
            assert child.wait() == -signal.SIGKILL
    model, optimizer = stepper.build()
    with stepper.attach(model, optimizer, store) as session:
        resumed = session.resume(mode="partial")
        assert (resumed.exact, resumed.whole) == (False, False)
        (reason,) = resumed.reasons
        assert reason.startswith("all partitions are of step 3, but ")
    for _ in range(2):  # closed without a step: from then on the same state is in one commit
        model, optimizer = stepper.build()
        with stepper.attach(model, optimizer, store) as session:
            resumed = session.resume()
            assert (resumed.step, resumed.exact, resumed.whole) == (4, False, True)
            assert resumed.reasons == (f"it was not exact when it was resumed before: {reason}",)
