"""Test `session.iteration()`: between its blocks nothing is lost by a signal or an evacuation, and nothing waits.

The processes are real, and so are the signals. A block adds 1 to every value, with a pause after a half of the rows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scarctl
import scarctl.session.departure
from scarctl.config import grouped
from scarctl.daemon.request import Request
from scarctl.errors import ScarError, Unavailable, UsageError
from tests.session.test_evacuate import throttle
from tests.support.process import Forked, Tell
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm_torch")

ROWS = 16
LONG = 600.0


class Server:
    """A server of a table that answers in blocks."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.table = np.zeros((ROWS, 4))
        self.count = {"requests": 0}
        settings: dict[str, Any] = {"interval": 1000, "rows": {"table": 1}, "extras": {"count": self.count}}
        self.session = scarctl.attach({"table": self.table}, store=store, **grouped(**settings | options))

    def half(self) -> None:
        self.table[: ROWS // 2] += 1

    def change(self, pause: Callable[[], object] = lambda: None) -> None:
        self.half()
        pause()
        self.table[ROWS // 2 :] += 1
        self.count["requests"] += 1

    def serve(self, requests: int = 1, pause: Callable[[], object] = lambda: None) -> None:
        for _ in range(requests):
            with self.session.iteration():
                self.change(pause)

    def flush_waits(self) -> None:
        """Return once a flush waits for the end of the block."""
        wait_until(lambda: self.session._gate._wanted)


def resumed(store: Path, mode: Any = "partial") -> tuple[scarctl.session.recover.Resumed, list[float], int]:
    """Return how a new process would continue: the result, the values of the table, and the count in extras."""
    server = Server(store)
    found = server.session.resume(mode)
    values = sorted(set(server.table.ravel().tolist()))
    server.session.close(seal=False)
    return found, values, server.count["requests"]


def never_waits() -> None:
    """Make a flush that waits outlast the test: it has to find out at once that no step is running."""
    scarctl.session.departure.FLUSH_SECONDS = LONG


def sigterm(body: Callable[[Tell], object]) -> None:
    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM


def waits() -> None:
    threading.Event().wait()


# -- signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [True, False])
def test_sigterm_between_two_blocks_is_exact_and_at_once(
    tmp_path: Path, both_savers: str, main: bool
) -> None:
    """Whether the main thread serves, or another one."""

    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        server.session.resume()
        if main:
            server.serve(7)
        else:
            thread = threading.Thread(target=server.serve, args=(7,))
            thread.start()
            thread.join()
        tell("ready")
        waits()

    sigterm(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.exact, values, count) == (7, True, [7.0], 7)


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


def test_sigterm_within_a_block_waits_for_its_end(tmp_path: Path, both_savers: str) -> None:
    def body(tell: Tell) -> None:
        server = Server(tmp_path / "s")
        server.serve(3)
        with server.session.iteration():
            server.change(lambda: (tell("ready"), server.flush_waits()))
        waits()

    sigterm(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.exact, values, count) == (4, True, [4.0], 4)


def test_sigterm_within_a_block_that_does_not_end(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        scarctl.session.departure.FLUSH_SECONDS = 0.2
        server = Server(tmp_path / "s")
        server.serve(3)
        server.session.checkpoint(full=True)
        server.serve(1, lambda: (tell("ready"), waits()))

    sigterm(body)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, values) == (3, True, [3.0]), "no half of a block is saved"


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

    with Forked(body) as child:
        child.expect("ready")
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    found, values, count = resumed(tmp_path / "s")
    assert 0 < found.step <= 6
    assert (values, count) == ([float(found.step)], found.step)


# -- exceptions --------------------------------------------------------------------------------------------------


def fails(server: Server, pause: Callable[[], object] = lambda: None) -> None:
    """Serve a request that raises KeyError after a half of its changes."""

    def raises() -> None:
        pause()
        raise KeyError("bad request")

    with server.session.iteration():
        server.change(raises)


def raises(server: Server, pause: Callable[[], object] = lambda: None) -> None:
    with pytest.raises(KeyError):
        fails(server, pause)


def test_sigterm_after_a_block_that_raised_saves_what_there_is_and_does_not_call_it_exact(
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

    sigterm(body)
    found, values, count = resumed(tmp_path / "s")
    assert (found.step, found.exact, found.whole, values, count) == (3, False, False, [3.0, 4.0], 3)
    assert any("has raised an exception" in reason for reason in found.reasons)


def test_a_rollback_after_a_block_that_raised_is_to_the_state_before(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(3)
    server.session.checkpoint(full=True, wait=True)
    raises(server)
    assert not server.session.flush()
    server.session.close()
    found, values, _ = resumed(tmp_path / "s", "rollback")
    assert (found.step, found.exact, values) == (3, True, [3.0])


def test_the_next_block_makes_the_state_exact_again(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(3)
    raises(server)
    assert server.session.stepping
    assert not server.session.flush()
    server.serve()
    assert not server.session.stepping
    assert server.session.head_step == 4
    assert server.session.flush()
    server.session.close()
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, values) == (4, True, [4.0, 5.0]), "what it changed stays"


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
    assert [caveat.kind for caveat in server.session.caveats] == ["iteration-failed"]
    server.serve()
    assert [caveat.kind for caveat in server.session.caveats] == []
    server.session.close()


def test_an_exception_that_ends_the_run_leaves_the_state_before(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.session.resume()
    server.serve(3)
    server.session.flush()
    with pytest.raises(KeyError), server.session:
        fails(server)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, values) == (3, True, [3.0])


def test_a_flush_that_waits_for_a_block_that_raises(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        never_waits()
        server = Server(tmp_path / "s")
        server.serve(3)
        raises(server, lambda: (tell("ready"), server.flush_waits()))
        waits()

    sigterm(body)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, values) == (3, False, [3.0, 4.0])


# -- threads -----------------------------------------------------------------------------------------------------


def test_a_pool_of_threads_serves_one_request_after_the_other(tmp_path: Path, both_savers: str) -> None:
    def body(tell: Tell) -> None:
        server = Server(tmp_path / "s", interval=3)
        pause = threading.Event()

        def work() -> None:
            while True:
                server.serve(1, lambda: pause.wait(0.001))

        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        wait_until(lambda: server.session.head_step >= 40)
        tell("ready")
        waits()

    sigterm(body)
    found, values, count = resumed(tmp_path / "s")
    assert found.step >= 40
    assert (found.exact, values, count) == (True, [float(found.step)], found.step)


def test_a_checkpoint_of_another_thread_waits_for_the_block(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(2)
    saving = threading.Thread(target=server.session.checkpoint, kwargs={"full": True})
    with server.session.iteration():
        server.half()
        saving.start()
        saving.join(0.3)
        assert saving.is_alive()
        server.table[ROWS // 2 :] += 1
    saving.join()
    server.session._saver.stop()
    server.session.close(seal=False)
    found, values, _ = resumed(tmp_path / "s")
    assert (found.step, found.exact, values) == (3, True, [3.0])


def test_a_flush_of_another_thread_waits_for_the_block(tmp_path: Path) -> None:
    server, found = Server(tmp_path / "s"), list[bool]()
    server.serve(2)
    flushing = threading.Thread(target=lambda: found.append(server.session.flush(LONG)))
    with server.session.iteration():
        assert not server.session.flush(LONG), "its own thread would wait forever"
        server.half()
        flushing.start()
        server.flush_waits()
        assert not found
        server.table[ROWS // 2 :] += 1
    flushing.join()
    assert found == [True]
    server.session.close(seal=False)
    assert resumed(tmp_path / "s")[1] == [3.0]


def test_closing_in_another_thread_ends_the_blocks_that_wait(tmp_path: Path) -> None:
    server, refused = Server(tmp_path / "s"), list[str]()
    server.serve(2)

    def serve() -> None:
        try:
            server.serve()
        except UsageError as error:
            refused.append(str(error))

    with server.session.iteration():
        server.change()
        waiting = threading.Thread(target=serve)
        waiting.start()
        closing = threading.Thread(target=server.session.close)
        closing.start()
        server.flush_waits()
    closing.join()
    waiting.join()
    found, values, _ = resumed(tmp_path / "s")
    assert found.exact
    assert values == [float(found.step)]
    assert (found.step, refused) in [(3, ["the session is closed"]), (4, [])]


def test_coroutines_that_await_within_a_block_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve()

    async def serve() -> None:
        with server.session.iteration():
            server.half()
            await asyncio.sleep(0)

    async def both() -> list[BaseException | None]:
        return await asyncio.gather(serve(), serve(), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None
    assert isinstance(second, UsageError)
    assert "await" in str(second.hint)
    server.session.close()


# -- misuse ------------------------------------------------------------------------------------------------------


def test_calls_within_a_block_that_belong_after_it(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(2)
    session = server.session
    calls: list[Callable[[], object]] = [
        lambda: session.checkpoint(),
        lambda: session.checkpoint(full=True),
        lambda: session.snapshot("within"),
        lambda: session.recover("table"),
        lambda: session.close(),
        lambda: server.serve(),
    ]
    with session.iteration():
        for call in calls:
            with pytest.raises(UsageError, match="within a block"):
                call()
        with pytest.raises(UsageError, match="count one twice"):
            session.step()
    assert session.head_step == 3
    with pytest.raises(UsageError, match="count one twice"):
        session.step()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.iteration()


def test_a_loop_with_hooks_needs_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(model, optimizer, store=tmp_path / "s")
    with pytest.raises(UsageError, match="hooks"):
        session.iteration()
    session.close()
    with scarctl.attach(model, optimizer, store=tmp_path / "t", hooks="off") as session:
        for _ in range(3):
            with session.iteration():
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        assert not session.stepping
        assert session.flush()


def test_blocks_may_follow_steps(tmp_path: Path) -> None:
    """As of a server that first trains: what comes between the last step and the first block belongs to that."""
    server = Server(tmp_path / "s")
    for _ in range(2):
        server.change()
        server.session.step()
    assert server.session.stepping
    server.half()
    with server.session.iteration():
        server.table[ROWS // 2 :] += 1
    assert (server.session.head_step, server.session.stepping) == (3, False)
    server.session.close()


def test_a_run_that_was_not_resumed_begins_no_block(tmp_path: Path) -> None:
    first = Server(tmp_path / "s")
    first.serve(2)
    first.session.close()
    again = Server(tmp_path / "s")
    with pytest.raises(UsageError, match="resume"):
        again.serve()
    assert again.table.max() == 0
    again.session.resume()
    again.serve()
    assert again.session.flush()
    again.session.close()


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


def test_a_change_outside_belongs_to_the_next_block(tmp_path: Path) -> None:
    server = Server(tmp_path / "s")
    server.serve(3)
    server.table += 10
    server.serve()
    assert server.session.flush()
    assert not list(server.session.caveats)
    server.session.close()


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

    sigterm(body)
    for name, step in (("a", 5), ("b", 3)):
        found, values, _ = resumed(tmp_path / name)
        assert (found.step, found.exact, values) == (step, True, [float(step)])


# -- evacuations and commands ------------------------------------------------------------------------------------


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
