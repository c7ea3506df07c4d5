"""Test blocks of `session.iteration()` in several threads, and calls that do not belong in them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scarctl.errors import UsageError
from tests.session.serving import LONG, ROWS, Server, resumed, waits
from tests.support.process import Tell, end_by_signal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm_torch")


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

    end_by_signal(body)
    found, values, count = resumed(tmp_path / "s")
    assert found.step >= 40
    assert (found.consistent, values, count) == (True, [float(found.step)], found.step)


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
    assert (found.step, found.consistent, values) == (3, True, [3.0])


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
    assert found.consistent
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
        assert not session.flush(LONG), "its own thread would wait forever"
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
