"""Start a program with its output in a file, wait for it, and end all of its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from scarctl.config.environment import REHEARSAL
from scarctl.errors import UsageError

_POLL = 0.05
_GRACE = 10.0
"""Seconds that processes without a session get to end, once all sessions have ended."""
_GONE = 5.0
_TAIL = 20
"""Lines of the output that are shown when the program fails."""
_LINE = 300


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
    done: Callable[[], bool],
) -> int | None:
    """Run a program to its end. Return its exit code, -N if signal N ended it; None after `timeout` seconds.

    done: whether all that is wanted has happened: then it is ended after a moment. No process of it remains.
    Raises UsageError if it cannot be started.
    """
    deadline = time.monotonic() + timeout
    process = None
    try:
        with open(log_of(folder), "ab") as log:
            try:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(
                    f"{command[0]}: {error.strerror}", hint="give the command after --"
                ) from None
        while (code := process.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
            if done():
                deadline = min(deadline, time.monotonic() + _GRACE)
        return code if code is not None or not done() else 0
    finally:
        _end(process, folder)


def tail(folder: Path) -> list[str]:
    """Return the last lines of a run's output."""
    with open(log_of(folder), errors="replace") as file:
        return [line.rstrip("\n")[:_LINE] for line in deque(file, _TAIL)]


def log_of(folder: Path) -> Path:
    """Return the file with a run's output."""
    return folder / "output.txt"


def _end(process: subprocess.Popen[bytes] | None, folder: Path) -> None:
    """Kill what is left of a program: its group, and processes that have left it, by the variable they inherited.

    process: None if Ctrl-C came while it was started: then only the variable finds it.
    """
    if process is not None:
        with contextlib.suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + _GONE
    while sys.platform == "linux" and time.monotonic() < deadline:
        left = list(_of_run(folder))
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if process is None:
                with contextlib.suppress(ChildProcessError):  # a child's child
                    os.waitpid(pid, 0)
        time.sleep(_POLL)


def _of_run(folder: Path) -> Iterator[int]:
    """Yield the processes of this user that were started with the variable of a run in this folder."""
    name, place = f"{REHEARSAL}=".encode(), os.fsencode(folder.parents[1].name)  # unique
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if any(one.startswith(name) and place in one for one in variables):
            yield int(path.parent.name)
