"""Test `session.iteration()`: between its blocks nothing is lost by a signal or an evacuation, and nothing waits.

The processes are real, and so are the signals.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import scarctl
import scarctl.session.departure
from scarctl.daemon.request import Request
from scarctl.errors import ScarError, Unavailable
from tests.session.serving import LONG, ROWS, Server, fails, never_waits, raises, resumed, waits
from tests.session.test_evacuate import throttle
from tests.support.process import Forked, Tell, end_by_signal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm_torch")


def test_sigterm_between_two_blocks_is_exact_and_at_once(tmp_path: Path, both_savers: str) -> None:
    """Though another thread serves."""

    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        server.session.resume()
        thread = threading.Thread(target=server.serve, args=(7,))
        thread.start()
        thread.join()
        tell("ready")
        waits()

    end_by_signal(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.consistent, values, count) == (7, True, [7.0], 7)


def test_sigterm_within_a_block_waits_for_its_end(tmp_path: Path, both_savers: str) -> None:
    def body(tell: Tell) -> None:
        server = Server(tmp_path / "s")
        server.serve(3)
        with server.session.iteration():
            server.change(lambda: (tell("ready"), server.flush_waits()))
        waits()

    end_by_signal(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.consistent, values, count) == (4, True, [4.0], 4)


@pytest.mark.parametrize("within", [False, True])
def test_once_sigterm_has_flushed_no_request_is_answered(tmp_path: Path, within: bool) -> None:
    """It would be lost: an evacuation has its time, but nothing more is saved. The process then ends by the signal."""

    def body(tell: Tell) -> None:
        if within:
            scarctl.session.departure.FLUSH_SECONDS = 0.1
        server = Server(tmp_path / "s", grace="2s")
        server.serve(3)
        throttle(server.session, 100.0)
        doomed = lambda: wait_until(lambda: server.session._saving.doomed)  # noqa: E731
        if not within:
            tell("ready")
            doomed()
        server.serve(1, (lambda: (tell("ready"), doomed())) if within else (lambda: None))
        tell("answered")

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        with pytest.raises(AssertionError, match="only \\[\\]"):
            child.line()
        assert child.wait() == -signal.SIGTERM
    # A block that did not end was not waited for, and nothing was flushed: the first checkpoint is the only one.
    assert resumed(tmp_path / "s")[1] == ([1.0] if within else [3.0])


def test_kill_9_within_a_block(tmp_path: Path) -> None:
    """Copies are made at a block's end only, so a half of one is never seen."""

    def body(tell: Tell) -> None:
        server = Server(tmp_path / "s", interval=1, fraction=1.0)
        server.serve(6)
        server.serve(1, lambda: (tell("ready"), waits()))

    end_by_signal(body, signal.SIGKILL)
    found, values, count = resumed(tmp_path / "s")
    assert 0 < found.step <= 6
    assert (values, count) == ([float(found.step)], found.step)


def test_sigterm_after_a_block_that_raised_leaves_the_state_before_it(
    tmp_path: Path,
) -> None:
    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        server.serve(3)
        server.session.checkpoint(full=True, wait=True)
        raises(server)
        tell("ready")
        waits()

    end_by_signal(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.consistent, values, count) == (3, True, [3.0], 3)


def test_no_checkpoint_claims_to_have_a_block_that_raised(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(3)
    raises(server)
    with pytest.raises(Unavailable, match="raised an exception") as caught:
        server.session.checkpoint(full=True, wait=True)
    assert caught.value.kind == "not-saved"
    with pytest.raises(ScarError):
        server.session.snapshot("half")
    server.session.checkpoint(full=True)
    assert server.session.stepping
    server.serve()
    assert not server.session.stepping
    server.session.checkpoint(full=True, wait=True)
    server.session.close()
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.consistent, values) == (4, True, [4.0, 5.0]), "what it changed stays"


def test_an_exception_that_ends_the_run_leaves_the_state_before(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.session.resume()
    server.serve(3)
    server.session.flush()
    with pytest.raises(KeyError), server.session:
        fails(server)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.consistent, values) == (3, True, [3.0])


def test_several_sessions_in_one_process(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        never_waits()
        first, second = Server(tmp_path / "a"), Server(tmp_path / "b")
        first.serve(2)
        for _ in range(3):
            with first.session.iteration(), second.session.iteration():
                first.change()
                second.change()
        tell("ready")
        waits()

    end_by_signal(body)
    for name, step in (("a", 5), ("b", 3)):
        found, values, _ = resumed(tmp_path / name)
        assert (found.step, found.consistent, values) == (step, True, [float(step)])


def test_an_evacuation_while_the_server_waits_is_exact_and_at_once(tmp_path: Path, both_savers: str) -> None:
    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        server.serve(5)
        thread = threading.Thread(target=lambda: tell(report(server.session.evacuate(LONG))))
        thread.start()
        waits()

    def report(found: Any) -> str:
        return f"{found.safe} {found.sealed} {found.flushed} {found.step}"

    with Forked(body) as child:
        assert child.line() == "True True True 5"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert resumed(tmp_path / "s")[1] == [5.0]


def test_a_recovery_that_a_command_requests_comes_at_a_blocks_end(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(3)
    server.session.checkpoint(full=True, wait=True)
    server.session._requests.add(Request("recover", lost=("table[0:2]",)))
    server.serve()
    assert server.session.stats.recoveries == 1
    assert server.table[:, 0].tolist() == [3.0] * 2 + [4.0] * (ROWS - 2)
    assert server.session.stats.errors == 0
    server.session.close()


def test_a_flush_that_waits_for_a_block_that_raises(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        server.serve(3)
        server.session.checkpoint(full=True)
        raises(server, lambda: (tell("ready"), server.flush_waits()))
        waits()

    end_by_signal(body)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.consistent, values) == (3, True, [3.0])
