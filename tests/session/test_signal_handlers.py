"""Test what sessions change in the signal handling of a process, and that they restore everything."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

from scarctl.session import signals
from tests.support.process import Forked, Tell
from tests.support.training import Loop


def test_everything_is_put_back(tmp_path: Path) -> None:
    """The wakeup file of an event loop works meanwhile, and is restored in the end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(5.0)
    before = {s: signal.getsignal(s) for s in signals.SIGNALS}
    threads = set(threading.enumerate())
    handled: list[int] = []
    usual = signal.signal(signal.SIGUSR1, lambda signum, frame: handled.append(signum))
    old = signal.set_wakeup_fd(theirs.fileno())
    try:
        first = Loop(tmp_path / "first")
        second = Loop(tmp_path / "second")
        signal.raise_signal(signal.SIGUSR1)
        assert ours.recv(10) == bytes([signal.SIGUSR1])
        assert handled == [signal.SIGUSR1]
        first.session.close()
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM], "the second session needs it"
        second.session.close()
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGUSR1, usual)
        ours.close()
        theirs.close()
    assert {s: signal.getsignal(s) for s in signals.SIGNALS} == before
    assert {t for t in threading.enumerate() if t not in threads} == set()


def test_flush_on_signal_can_be_left_out(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    loop = Loop(tmp_path / "store", flush_on_signal=False, interval=100)
    assert signal.getsignal(signal.SIGTERM) == before
    loop.train(2)
    assert loop.session._saving.moment is None
    assert loop.session.flush()
    loop.session.close()


def test_attached_in_another_thread_it_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    loops: list[Loop] = []
    thread = threading.Thread(target=lambda: loops.append(Loop(tmp_path / "store")))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    loops[0].train(2)
    loops[0].session.close()


def test_signals_to_a_forked_child_do_nothing_to_its_parent(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(2)
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)

    def body(tell: Tell) -> None:
        assert signal.set_wakeup_fd(-1) == -1
        tell("ready")
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            os._exit(1)  # a traceback might wait for a lock of a thread that the child does not have

    for signum in (signal.SIGTERM, signal.SIGINT):
        with Forked(body) as child:
            child.expect("ready")
            child.signal(signum)
            # SIGINT is a KeyboardInterrupt there, as it was before.
            assert child.wait() == (-signum if signum == signal.SIGTERM else 1)
    # At once after the fork as well.
    for _ in range(20):
        pid = os.fork()
        if not pid:
            time.sleep(1)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    time.sleep(0.2)
    assert loop.session._saving.flushed is None
    loop.session.close()
