"""Test that a state at rest is distinguished from one that has changed, where no hook reports a step."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import scarctl
import scarctl.session.departure
from tests.session.serving import ROWS, Server, never_waits, resumed, sigterm, waits
from tests.support.process import Tell

pytestmark = pytest.mark.usefixtures("warm_torch")


@pytest.mark.parametrize("blocks", [True, False])
def test_sigterm_before_a_restarted_server_has_got_a_request(tmp_path: Path, blocks: bool) -> None:
    """Whether it will use blocks or `step` is not known yet: nothing has changed since the resume."""

    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        assert server.session.resume().step == 5
        tell("ready")
        waits()

    server = Server(tmp_path / "s")
    for _ in range(5):
        if blocks:
            server.serve()
        else:
            server.change()
            server.session.step()
    server.session.close()
    sigterm(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.exact, values, count) == (5, True, [5.0], 5)


def test_sigterm_after_a_whole_checkpoint_of_a_loop_with_steps(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        server.change()
        server.session.step()
        server.session.checkpoint(full=True)
        tell("ready")
        waits()

    sigterm(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.exact, values, count) == (1, True, [1.0], 1)


def test_a_step_that_runs_is_not_taken_for_rest(tmp_path: Path) -> None:
    """The state equals its copies no longer: the flush waits for `step`, as it always did."""

    def body(tell: Tell) -> None:
        never_waits()
        scarctl.session.departure._AT_REST = 0.0
        server = Server(tmp_path / "s")
        server.change()
        server.session.step()
        server.session.checkpoint(full=True)
        server.half()
        tell("ready")
        server.flush_waits()
        server.table[ROWS // 2 :] += 1
        server.session.step()
        waits()

    sigterm(body)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, values) == (2, True, [2.0])


def test_a_step_that_ends_after_the_look_for_rest_is_not_called_saved(tmp_path: Path) -> None:
    """A request comes while a flush compares the state: its step has ended, and the next one may run."""
    server = Server(tmp_path / "s")
    server.change()
    server.session.step()
    server.session.checkpoint(full=True)
    look, looked, running = server.session._saving.rested, threading.Event(), threading.Event()

    def slowly(patience: float) -> int | None:
        found = look(patience)
        looked.set()
        running.wait()
        return found

    server.session._saving.rested = slowly  # type: ignore[method-assign]
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(server.session.evacuate(1.0).flushed))
    thread.start()
    looked.wait()
    server.change()
    server.session.step()
    server.half()
    running.set()
    thread.join()
    assert found == [False]
    server.session.close(seal=False)


@pytest.mark.parametrize("saved", [True, False])
def test_a_change_outside_of_blocks_is_not_called_exact(tmp_path: Path, saved: bool) -> None:
    """Found in each row if the newest block's state was saved as a whole, otherwise in a sample."""

    def body(tell: Tell) -> None:
        server = Server(tmp_path / "s")
        server.serve(3)
        if saved:
            server.session.checkpoint(full=True)
            server.table[0, 0] = 100
        else:
            server.table += 100
        tell("ready")
        waits()

    sigterm(body)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, found.whole) == (3, False, True)
    assert values == ([3.0, 100.0] if saved else [103.0])
    assert "outside of session.iteration()" in found.reasons[0]


@pytest.mark.parametrize("within", [True, False])
def test_an_array_put_in_place_of_another_outside_of_blocks_is_not_called_exact(
    tmp_path: Path, within: bool
) -> None:
    """within: blocks replace it, too. Then only the newest one has the values to compare with."""

    def body(tell: Tell) -> None:
        state, requests = {"table": np.zeros((ROWS, 4))}, {"requests": 0}
        session = scarctl.attach(
            state,
            store=tmp_path / "s",
            interval=1000,
            extras={"count": requests},
            partitioning=scarctl.Partitioning(rows={"table": 1}),
        )
        session.resume()
        for _ in range(3):
            with session.iteration():
                if within:
                    state["table"] = state["table"] + 1
                else:
                    state["table"] += 1
                requests["requests"] += 1
        assert session.flush()
        assert not list(session.caveats)
        with session.iteration():
            state["table"] = state["table"] + 1
        if within:
            state["table"] += 100
        else:
            state["table"] = state["table"] + 100
        tell("ready")
        waits()

    sigterm(body)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, found.whole, values) == (4, False, True, [104.0])
    assert "outside of session.iteration()" in found.reasons[0]


def test_a_change_outside_belongs_to_the_next_block(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(3)
    server.table += 10
    server.serve()
    assert server.session.flush()
    assert not list(server.session.caveats)
    server.session.close()
