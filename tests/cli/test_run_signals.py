"""Test the signals that `scarctl run` forwards to its command."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.cli.run import _Forwarding
from scarctl.daemon.__main__ import LOCK
from tests.cli.running import Running
from tests.daemon.trainer import stop
from tests.support.waiting import wait_until

HEARS = """
import signal, sys
wanted = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print("ready", flush=True)
while (number := signal.sigwait(wanted)) != signal.SIGTERM:
    print(signal.Signals(number).name, flush=True)
print("SIGTERM", flush=True)
sys.exit(9)
"""
"""A command that prints the signals that it gets, up to SIGTERM."""
HEARING = [sys.executable, "-S", "-c", HEARS]


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Make started processes handle these signals, even if this process ignores them (`nohup`)."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_forwarded(folder: Path, tmp_path: Path) -> None:
    running = Running(tmp_path, "--restarts", 3, "--", *HEARING)
    running.says("ready")
    sent = ["SIGUSR1", "SIGINT", "SIGUSR2", "SIGHUP", "SIGUSR1", "SIGTERM"]
    for count, name in enumerate(sent):
        running.process.send_signal(signal.Signals[name])
        running.says("\n", count + 2)
    done = running.ends(9)
    assert done.stdout.split() == ["ready", *sent]
    assert done.stderr == "", "it was asked to end, and so it is not run again"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread's mask cannot be seen")
def test_no_other_thread_can_take_a_signal(folder: Path, tmp_path: Path) -> None:
    """A thread that takes a signal leaves it to the main thread, which waits for the command and would not wake."""
    running = Running(tmp_path, "--", *HEARING)
    running.says("ready")
    wanted = sum(
        1 << (signal.Signals[name] - 1) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    )

    def open_threads() -> int:
        """Return how many threads can take one of the signals. The thread that waits for them counts while it waits."""
        states = [state.read_text() for state in Path(f"/proc/{running.process.pid}/task").glob("*/status")]
        masks = [int(state.split("SigBlk:\t")[1].split()[0], 16) for state in states]
        return sum(mask & wanted != wanted for mask in masks)

    wait_until(lambda: open_threads() <= 1)
    running.process.send_signal(signal.SIGTERM)
    running.ends(9)


def test_a_signal_before_the_command_has_started(folder: Path, tmp_path: Path) -> None:
    """Another process has the daemon's lock, so the daemon takes long to start."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        stop(folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            running = Running(tmp_path, "--", "sh", "-c", "touch ran; exec sleep 60")
            running.handles_signals()
            running.process.send_signal(number)
            time.sleep(0.05)
        running.ends(128 + number)
        if number == signal.SIGTERM:
            assert not (tmp_path / "ran").exists()


def on_terminal(place: Path, terminal: int) -> Running:
    """Start `scarctl run` and its command in the foreground of a terminal, and wait until the command is ready."""
    running = Running(
        place, "--", *HEARING, stdin=terminal, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    )
    running.says("ready")
    return running


def test_an_interrupt_by_the_terminal_comes_once(folder: Path, tmp_path: Path) -> None:
    """The terminal sends the signal to the command as well: both are in its foreground."""
    ours, theirs = pty.openpty()
    try:
        running = on_terminal(tmp_path, theirs)
        os.write(ours, b"\x03")
        running.says("SIGINT")
        running.process.send_signal(signal.SIGTERM)
        assert running.ends(9).stdout.split() == ["ready", "SIGINT", "SIGTERM"]
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells where a signal came from")
def test_what_is_sent_to_it_alone_on_a_terminal_is_forwarded(folder: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        running = on_terminal(tmp_path, theirs)
        for count, name in enumerate(("SIGINT", "SIGHUP")):
            running.process.send_signal(signal.Signals[name])
            running.says("\n", count + 2)
        os.write(ours, b"\x03")
        running.says("SIGINT", 2)
        os.close(ours)  # the terminal hangs up
        running.says("SIGHUP", 2)
        running.process.send_signal(signal.SIGTERM)
        assert running.ends(9).stdout.split() == ["ready", "SIGINT", "SIGHUP", "SIGINT", "SIGHUP", "SIGTERM"]
    finally:
        os.close(theirs)


def test_signals_are_as_before_afterwards(folder: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)]
    with _Forwarding() as forwarding:
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: forwarding.asked == signal.SIGHUP)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)] == handlers
    assert not any(thread.name == "scarctl-signals" for thread in threading.enumerate())
