"""Test what is saved when a loop fails in an iteration, and the newest step's end was not kept.

Whatever is called exact has to continue to the same bits as an undisturbed run, from the first batch on.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.session.failing import FAILS, KINDS, PLACES, Broken, Failing
from tests.support.forkserver import run
from tests.support.training import differing

pytestmark = pytest.mark.usefixtures("one_thread")


def undisturbed(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    loop = Failing(folder / "undisturbed", kind)
    loop.train()
    loop.session.close()
    return loop.reached()


def failed(store: Path, kind: str, place: str, **options: Any) -> Failing:
    loop = Failing(store, kind, **options)
    with pytest.raises(Broken), loop.session:
        loop.train(place)
    assert loop.session.stats.errors == 0
    return loop


def continued(store: Path, kind: str) -> tuple[Failing, bool]:
    """Return the loop that has continued to the end, and what its `resume` said of exactness before the first batch."""
    loop = Failing(store, kind)
    exact = loop.resumed.exact
    loop.train()
    loop.session.close()
    return loop, exact


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_exception_only_what_continues_so_is_called_exact(
    tmp_path: Path, kind: str, place: str
) -> None:
    failed(tmp_path / "store", kind, place)
    loop, exact = continued(tmp_path / "store", kind)
    assert loop.resumed.step == FAILS, "the parameters are those of the newest step"
    assert not differing(loop.reached(), undisturbed(tmp_path, kind)) or not exact


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_that_ends_the_process(tmp_path: Path, kind: str) -> None:
    done = run(["-m", "tests.session.failing", str(tmp_path / "store"), kind, "drawn"], timeout=120)
    assert done.returncode == 1
    loop, exact = continued(tmp_path / "store", kind)
    assert loop.resumed.step == FAILS
    assert not differing(loop.reached(), undisturbed(tmp_path, kind)) or not exact


@pytest.mark.parametrize("kind", ["drawn", "block"])
def test_why_it_is_not_exact_is_said_at_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    failed(store, kind, "drawn")
    assert "the end of step 5 was not kept" in caplog.text
    found = survey(Store.open(store), None).caveats
    assert [(caveat.kind, caveat.inexact) for caveat in found] == [("end-not-kept", True)]
    loop = Failing(store, kind)
    assert (loop.resumed.exact, loop.resumed.whole) == (False, True)
    assert "the end of step 5 was not kept" in loop.resumed.reasons[0]
    assert loop.position == {"batches": FAILS + 1}, "what the reason is about"
    loop.train()
    assert list(loop.session.caveats) == [], "it is gone with the next step"
    loop.session.close()


@pytest.mark.parametrize("kind", ["drawn", "batches", "block"])
@pytest.mark.parametrize("options", [{"flush_on_signal": True}, {"interval": 1}])
def test_a_step_s_end_that_was_kept_is_exact(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """It is kept for every step, or for the regular checkpoint that came after this one."""
    failed(tmp_path / "store", kind, "forward", **options)
    loop, exact = continued(tmp_path / "store", kind)
    assert (loop.resumed.step, exact, loop.resumed.exact, loop.resumed.reasons) == (FAILS, True, True, ())
    assert differing(loop.reached(), undisturbed(tmp_path, kind)) == []


@pytest.mark.parametrize("kind", ["drawn", "batches", "block"])
def test_a_loop_that_fails_at_once_after_it_has_resumed_leaves_what_is_saved(
    tmp_path: Path, kind: str
) -> None:
    failed(tmp_path / "store", kind, "forward", interval=1)
    for _ in range(2):
        again = failed(tmp_path / "store", kind, "forward")
        assert (again.resumed.step, again.resumed.exact) == (FAILS, True)
    loop, exact = continued(tmp_path / "store", kind)
    assert (loop.resumed.step, exact, loop.resumed.exact) == (FAILS, True, True)
    assert differing(loop.reached(), undisturbed(tmp_path, kind)) == []


@pytest.mark.parametrize("kind", ["drawn", "batches"])
@pytest.mark.parametrize("place", ["", *PLACES])
def test_a_flush_in_an_iteration(tmp_path: Path, kind: str, place: str) -> None:
    """place: "" for right after the step, in the training thread, where nothing is missing."""
    loop = Failing(tmp_path / "store", kind)
    if place:
        with pytest.raises(Broken):
            loop.train(place)
        thread = threading.Thread(target=loop.session.flush)
        thread.start()
        thread.join()
    else:
        handle = loop.optimizer.register_step_post_hook(
            lambda *_: loop.session.flush() if loop.session.head_step == FAILS else None
        )
        with pytest.raises(Broken):
            loop.train("forward")
        handle.remove()
    loop.session.close(seal=False)
    again, exact = continued(tmp_path / "store", kind)
    assert again.resumed.step == FAILS
    assert exact or place
    assert not differing(again.reached(), undisturbed(tmp_path, kind)) or not exact


class Away:
    """Extras that cannot be read at the end of one step."""

    loop: Failing | None = None
    raised = False

    def state_dict(self) -> dict[str, int]:
        if self.loop is not None and self.loop.session.head_step == FAILS and not self.raised:
            self.raised = True
            raise OSError("the meter is away")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_step_s_end_that_could_not_be_read(tmp_path: Path) -> None:
    away = Away()
    loop = away.loop = Failing(tmp_path / "store", "drawn", flush_on_signal=True, extras={"away": away})
    with pytest.raises(Broken), loop.session:
        loop.train("drawn")
    assert (loop.session.stats.errors, loop.session.stats.last_error) == (1, "the meter is away")
    again = Failing(tmp_path / "store", "drawn", extras={"away": Away()})
    assert (again.resumed.step, again.resumed.exact) == (FAILS, False)
    assert "the end of step 5 was not kept" in again.resumed.reasons[0]
    again.session.close(seal=False)


@pytest.mark.parametrize("kind", ["drawn", "batches"])
def test_a_session_that_is_closed_in_an_iteration(tmp_path: Path, kind: str) -> None:
    loop = Failing(tmp_path / "store", kind)
    with pytest.raises(Broken):
        loop.train("forward")
    loop.session.close()
    again, exact = continued(tmp_path / "store", kind)
    assert (again.resumed.step, exact) == (FAILS, False)
