"""Start the host's daemon, and send it requests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from scarctl.daemon import protocol
from scarctl.daemon.status import DaemonStatus
from scarctl.errors import Contention, ScarError, Unavailable, UsageError
from scarctl.store.backends.address import PORTABLE

T = TypeVar("T")

START_SECONDS = 20.0
"""A daemon that does not answer by then, on a busy host, counts as not startable."""
REPLY_SECONDS = 60.0
RELEASE_SECONDS = 60.0
_ANSWER_SECONDS = 5.0
_PAUSE = 0.1
_LAST_MOMENTS = 0.005
"""One that is just ending keeps others from starting: not to be tried all the time."""
_PASSING = ("daemon-gone", "daemon-ending", "run-busy")
"""Kinds of errors after which the next attempt may succeed."""
_PACKAGES = Path(__file__).parents[2]


def start(folder: Path) -> None:
    """Start a daemon for `folder`, unless there is one. Returns when it accepts connections.

    Raises Unavailable (`kind` "daemon-not-started") with what it said when it could not start.
    """
    # The same packages as in this process, also where they were put on the path by hand.
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scarctl.daemon", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            # It multiplies no matrices: threads for that would only take memory.
            env={**_environment(), "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_started(folder, str(error)) from error
    if done.returncode:
        raise _not_started(folder, done.stderr.decode(errors="replace").strip()[-500:])


def _environment() -> dict[str, str]:
    """Return this process's environment without credentials for object stores: each session brings its own."""
    return {name: value for name, value in os.environ.items() if name not in PORTABLE}


def connect(folder: Path, *, begin: bool = True, patience: float = START_SECONDS) -> socket.socket:
    """Open a connection to the daemon of `folder`, started if need be (`begin`). Gives up after `patience` seconds.

    Raises Unavailable when there is none (`kind` "no-daemon") or it cannot be started; AccessDenied.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return protocol.connect(folder, REPLY_SECONDS)
        except BlockingIOError as error:
            missing: OSError = error  # there is one, and many talk to it
            time.sleep(_PAUSE)
        except (FileNotFoundError, ConnectionError) as error:
            missing = error
            if begin:
                start(folder)
                time.sleep(_LAST_MOMENTS)
        except OSError as error:
            raise Unavailable(f"the daemon in {folder} cannot be reached: {error}") from error
        if time.monotonic() > deadline or not (begin or isinstance(missing, BlockingIOError)):
            raise Unavailable(
                "no daemon is running on this host",
                hint="`scarctl daemon start` starts one",
                kind="no-daemon",
            ) from missing


def request(
    connection: socket.socket, op: str, *, patience: float = REPLY_SECONDS, **fields: Any
) -> dict[str, Any]:
    """Ask the daemon; returns its reply. Raises the error that it replies with.

    Raises Unavailable (`kind` "daemon-gone") when no answer comes within `patience` seconds; the connection is of no
    use then.
    """
    try:
        connection.settimeout(patience)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have said why
            protocol.send(connection, {"v": protocol.VERSION, "op": op, **fields})
        reply = protocol.receive(connection, protocol.MAX_REPLY)
    except (protocol.Closed, OSError) as error:
        raise gone() from error
    return protocol.check_reply(reply)


def ask(folder: Path, op: str, **fields: Any) -> dict[str, Any]:
    """Ask a daemon that is running one question. Raises Unavailable (`kind` "no-daemon") if none runs."""
    with contextlib.closing(connect(folder, begin=False)) as connection:
        return request(connection, op, **fields)


def ask_status(folder: Path, *, patience: float) -> DaemonStatus | None:
    """Return the status of a daemon that may be running. See `question`, which also says what is raised."""
    return cast("DaemonStatus | None", question(folder, "status", patience=patience))


def question(folder: Path, op: str, *, patience: float) -> dict[str, Any] | None:
    """Ask a daemon that may be running one question; return None if none runs, or if it has just gone.

    Raises Unavailable (`kind` "daemon-silent"), which names its process, when it is there and does not answer within
    `patience` seconds.
    """
    try:
        connection = connect(folder, begin=False, patience=patience)
    except Unavailable as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise _silent(0, patience) from error  # and nobody else's question is taken either
        if error.kind == "no-daemon":
            return None
        raise
    with contextlib.closing(connection):
        try:
            return _in_any_version(connection, op, patience)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                raise _silent(protocol.check_peer(connection), patience) from error
            if error.kind == "daemon-gone":
                return None
            raise


def _in_any_version(connection: socket.socket, op: str, patience: float) -> dict[str, Any]:
    try:
        return request(connection, op, patience=patience)
    except UsageError as error:
        if error.kind != "daemon-version":
            raise
        return request(connection, op, patience=patience, v=protocol.EARLIER)


def hold(folder: Path, seconds: int) -> int:
    """Have a daemon, started if need be, that waits that long for its first run; returns its process id."""

    def attempt() -> int:
        with contextlib.closing(connect(folder)) as connection:
            return int(request(connection, "hold", seconds=seconds)["pid"])

    return insist(attempt)


def go_on(folder: Path, store: str, options: Mapping[str, Any], part: tuple[int, int] | None = None) -> None:
    """Have a daemon, started if need be, save what a dead training process left in its arena. Does not wait for that.

    part: shard and least epoch, where it was one rank of several.

    Raises Contention when a process saves to the store, NoStore, AccessDenied, Unavailable.
    """

    def attempt() -> None:
        with contextlib.closing(connect(folder)) as connection:
            # And with the connection ends what to the daemon is a training process.
            named = None if part is None else {"shard": part[0], "epoch": part[1]}
            request(connection, "claim", store=store, options=dict(options), part=named)

    insist(attempt)


def wait_until_released(folder: Path, run_id: str, seconds: float = RELEASE_SECONDS) -> None:
    """Wait while the daemon, if there is one, still saves what a dead training process left.

    Returns when it has let go of the store, or has nothing to do with it. Raises Contention when a live process saves
    to it, and when the daemon is not ready after `seconds`; AccessDenied; what `question` raises.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = ask_status(folder, patience=_ANSWER_SECONDS)
        run = next((run for run in answer["runs"] if run["id"] == run_id), None) if answer else None
        if run is None:
            return
        if run["phase"] == "attached":
            raise Contention(
                f"{run['store']}: process {run['pid']} is saving to this store",
                hint="wait until it ends, or stop it; reading needs no lock",
            )
        if time.monotonic() > deadline:
            why = f": {run['last_error']}" if run.get("last_error") else ""
            raise Contention(
                f"{run['store']}: the daemon still saves what process {run['pid']} left{why}",
                hint="`scarctl daemon status` shows how far it is; `scarctl daemon stop` leaves the rest in memory",
            )
        time.sleep(_PAUSE)


def insist(attempt: Callable[[], T]) -> T:
    """Try until a daemon answers, for some time: one may just be ending, and there will be a new one.

    Raises what `attempt` raises; when the time is over, also what may pass.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return attempt()
        except ScarError as error:
            if error.kind not in _PASSING or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE)


def gone() -> Unavailable:
    """Return the error for a daemon that does not answer any more."""
    return Unavailable("the daemon has gone", hint="a session starts another one", kind="daemon-gone")


def _silent(pid: int, patience: float) -> Unavailable:
    return Unavailable(
        f"the daemon{f', process {pid},' if pid else ''} has not answered for {patience:g} s",
        hint="if it was stopped, SIGCONT lets it continue; if it is killed, what is in memory or durable stays so",
        kind="daemon-silent",
    )


def _not_started(folder: Path, reason: str) -> Unavailable:
    return Unavailable(
        f"the daemon in {folder} could not be started: {reason}",
        hint="daemon=False (SCARCTL_DAEMON=0) saves from the training process itself",
        kind="daemon-not-started",
    )
