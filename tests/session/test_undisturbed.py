"""Test that other packages' signal handlers wait while a session saves its last state."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from scarctl.session import ending
from scarctl.session.ending import undisturbed
from scarctl.session.gate import Gate
from tests.session.flushed import assert_goes_on_exactly, trained

NUMBERS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the signals whose handlers have run. Those of SIGTERM and SIGUSR1 raise."""
    found: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        found.append(signum)
        if signum in (signal.SIGTERM, signal.SIGUSR1):
            raise RuntimeError(f"signal {signum}: closed by peer")

    before = {number: signal.signal(number, handler) for number in NUMBERS}
    yield found
    for number, old in before.items():
        signal.signal(number, old)


def test_handlers_run_at_the_end_and_all_of_them(ran: list[int]) -> None:
    with pytest.raises(RuntimeError, match="closed by peer"), undisturbed():  # noqa: PT012
        for number in (signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert ran == []
    assert ran == [signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM]
    signal.raise_signal(signal.SIGCHLD)
    assert ran[3:] == [signal.SIGCHLD], "they are installed again"


def test_the_block_keeps_its_exception(ran: list[int]) -> None:
    with pytest.raises(RuntimeError, match="closed by peer") as caught, undisturbed():  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        raise KeyError("broken batch")
    assert isinstance(caught.value.__context__, KeyError)


def test_ctrl_c_and_timers_do_not_wait(ran: list[int]) -> None:
    with undisturbed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGALRM)
        assert ran == [signal.SIGINT, signal.SIGALRM]


def test_a_handler_that_the_block_installs_stays(ran: list[int]) -> None:
    with undisturbed():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_second_signal_does_not_wait(ran: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends it again means it: a store that does not answer may hold up the block."""
    monkeypatch.setattr(ending, "AGAIN", 0.0)
    reached: list[object] = []
    with pytest.raises(RuntimeError, match="closed by peer"), undisturbed():  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGCHLD)
        signal.raise_signal(signal.SIGCHLD)  # another worker has ended
        reached.append(list(ran))
        signal.raise_signal(signal.SIGTERM)
        reached.append("after the second one")
    assert reached == [[]]
    assert ran == [signal.SIGTERM, signal.SIGCHLD], "each ran once"


def test_a_signal_reaches_the_wakeup_file_once(ran: list[int]) -> None:
    """An event loop would call its own handler twice."""
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno())
        try:
            with undisturbed():
                signal.raise_signal(signal.SIGCHLD)
        finally:
            signal.set_wakeup_fd(before)
        assert reading.recv(16) == bytes([signal.SIGCHLD])
    assert ran == [signal.SIGCHLD]


def test_a_handler_that_the_block_installs_may_call_the_one_before_it(ran: list[int]) -> None:
    with undisturbed():
        inner = signal.getsignal(signal.SIGCHLD)
        assert callable(inner)
        signal.signal(signal.SIGCHLD, lambda signum, frame: inner(signum, frame))
        signal.raise_signal(signal.SIGCHLD)
        assert ran == []
    assert ran == [signal.SIGCHLD]
    signal.raise_signal(signal.SIGCHLD)
    assert ran == [signal.SIGCHLD] * 2, "it waits no longer"


def test_blocks_within_each_other(ran: list[int]) -> None:
    """A handler waits until the end of the outer one, as when a state's owner closes a session of its own."""
    with undisturbed():
        with undisturbed():
            signal.raise_signal(signal.SIGCHLD)
        assert ran == []
    assert ran == [signal.SIGCHLD]


def test_in_another_thread_nothing_waits(ran: list[int]) -> None:
    def work() -> None:
        with undisturbed():
            inside.set()
            goes_on.wait(60)

    inside, goes_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    signal.raise_signal(signal.SIGCHLD)
    assert ran == [signal.SIGCHLD], "handlers run in the main thread, which saves nothing"
    goes_on.set()
    thread.join()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("call", [1, 30, 1000])
def test_a_handler_that_raises_takes_nothing_from_the_last_state(
    tmp_path: Path,
    expected: dict[str, torch.Tensor],
    ran: list[int],
    monkeypatch: pytest.MonkeyPatch,
    call: int,
) -> None:
    """Lightning's, when rank 1 has died and torchrun ends rank 0, which closes its session. It comes at any call."""
    loop = trained(tmp_path / "store")
    calls, quiet = 0, Gate.quiet

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if calls == call:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    def counted(gate: Gate, *arguments: Any, **options: Any) -> Any:
        if not calls and threading.current_thread() is threading.main_thread():
            sys.setprofile(count)
        return quiet(gate, *arguments, **options)

    def handler(signum: int, frame: FrameType | None) -> None:
        raise RuntimeError("closed by peer")

    signal.signal(signal.SIGTERM, handler)
    monkeypatch.setattr(Gate, "quiet", counted)
    try:
        with pytest.raises(RuntimeError, match="closed by peer"), loop.session:
            raise KeyError("broken batch")
    finally:
        sys.setprofile(None)
    monkeypatch.undo()
    assert calls == call
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)
