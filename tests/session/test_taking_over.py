"""Test a notebook's cell that was interrupted and is run again."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scarctl.errors import Contention, UsageError
from tests.support.training import Loop as AnyLoop

Loop = partial(AnyLoop, hooks="auto")


def interrupted(store: Path, steps: int, **options: Any) -> BaseException:
    """Run a cell that Ctrl-C ends: its traceback holds the loop, the model, and so the session."""

    def cell() -> None:
        loop = Loop(store, **options)
        loop.train(steps)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        cell()
    return raised.value


@pytest.mark.usefixtures("both_savers")
def test_the_same_cell_again_continues_after_its_newest_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = interrupted(tmp_path / "store", 5)
    again = Loop(tmp_path / "store", seed=1)
    assert "closed this process's earlier session of" in caplog.text
    assert "after step 5" in caplog.text
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent) == (5, True)
    again.train(3)
    again.session.close()
    assert held.__traceback__ is not None
    with Loop(tmp_path / "store").session as session:
        assert session.resume().step == 8


def test_a_session_whose_model_nobody_holds(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(3)
    del loop
    again = Loop(tmp_path / "store")
    assert again.session.resume().step == 3
    again.session.close()


def test_one_that_ends_by_itself_or_trains_elsewhere_is_left_alone(tmp_path: Path) -> None:
    loops: list[Loop] = []
    with Loop(tmp_path / "a").session, pytest.raises(Contention, match=f"this process .{os.getpid()}."):
        Loop(tmp_path / "a")
    ready, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        loops.append(Loop(tmp_path / "b"))
        loops[0].train(1)
        ready.set()
        done.wait(60)
        loops[0].session.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert ready.wait(60)
    with pytest.raises(Contention, match="another session of this process"):
        Loop(tmp_path / "b")
    done.set()
    thread.join()


def test_the_arguments_of_resume_are_checked_on_an_empty_store(tmp_path: Path) -> None:
    with Loop(tmp_path / "store").session as session:
        with pytest.raises(UsageError, match="unknown mode 'rolback'"):
            session.resume(mode="rolback")  # type: ignore[arg-type]
        assert session.resume().step == 0


def test_the_loop_of_the_earlier_session_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loop(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "scarctl"), Loop(tmp_path / "store").session:
        assert "a loop that still uses it is no longer saved" in caplog.text
        first.train(2)
        assert first.session.head_step == 0
