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
    running = Running(tmp_path, "--restarts", 3, "--", *HEARING, fresh=True)
    running.says("ready")
    sent = ["SIGUSR1", "SIGINT", "SIGUSR2", "SIGHUP", "SIGUSR1", "SIGTERM"]
    for count, name in enumerate(sent):
        running.process.send_signal(signal.Signals[name])
        running.says("\n", count + 2)
    done = running.ends(9)
    assert done.stdout.split() == ["ready", *sent]
    assert done.stderr == "", "it was asked to end, and so it is not run again"


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


def test_signals_are_as_before_afterwards(folder: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)]
    with _Forwarding() as forwarding:
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: forwarding.asked == signal.SIGHUP)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)] == handlers
    assert not any(thread.name == "scarctl-signals" for thread in threading.enumerate())
