"""Run a training loop in a forked process, for tests that send real signals."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

Tell = Callable[[str], None]


PATIENCE = 100.0
"""Seconds that a test waits for what a child does, however busy the machine is."""


class Forked:
    """Runs `body(tell)` in a child; its messages are lines. It exits with 0, or 1 after an exception."""

    def __init__(self, body: Callable[[Tell], object]) -> None:
        self._told, told = os.pipe()
        self._lines: list[str] = []
        self._rest = b""
        self.pid = os.fork()
        if not self.pid:
            _run(body, told)
        os.close(told)
        self.status: int | None = None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            self.signal(signal.SIGKILL)
            self.wait()
        os.close(self._told)

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def expect(self, line: str, timeout: float = PATIENCE) -> None:
        """Wait for this line from the child."""
        deadline = time.monotonic() + timeout
        while line not in self._lines:
            self._read(deadline, repr(line))
        self._lines.remove(line)

    def _read(self, deadline: float, wanted: str) -> None:
        ready, _, _ = select.select([self._told], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(self._told, 65536) if ready else b""
        assert data, f"{wanted} was not told, only {self._lines}"
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += [text.decode() for text in lines]

    def line(self, timeout: float = PATIENCE) -> str:
        """Return the next line from the child."""
        deadline = time.monotonic() + timeout
        while not self._lines:
            self._read(deadline, "a line")
        return self._lines.pop(0)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return its exit code, or minus the signal that ended it."""
        deadline = time.monotonic() + timeout
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                assert time.monotonic() < deadline, "the child does not end"
                time.sleep(0.01)
        return self.status


def end_by_signal(body: Callable[[Tell], object], signum: int = signal.SIGTERM) -> None:
    """Run `body` in a process until it tells "ready", and end that with a signal."""
    with Forked(body) as child:
        child.expect("ready")
        child.signal(signum)
        assert child.wait() == -signum


def _run(body: Callable[[Tell], object], told: int) -> NoReturn:
    code = 1
    try:
        torch.set_num_threads(1)  # the parent's threads are not there
        body(lambda line: (os.write(told, line.encode() + b"\n"), None)[1])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
