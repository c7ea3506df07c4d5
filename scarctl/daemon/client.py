"""Start the host's daemon, and send it requests."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from scarctl.daemon import protocol
from scarctl.errors import Contention, ScarError, Unavailable
from scarctl.store.backends.address import PORTABLE

if TYPE_CHECKING:
    from scarctl.daemon.status import DaemonStatus
    from scarctl.persist.evacuated import Evacuated

T = TypeVar("T")
log = logging.getLogger("scarctl")

START_SECONDS = 60.0
"""Time after which a daemon that does not answer counts as failed. Hosts may be busy."""
_INSIST_SECONDS = 20.0
_LEAST_ATTEMPTS = 3
"""Attempts to reach a daemon, at least: on a busy host a single one may take longer than `_INSIST_SECONDS`."""
REPLY_SECONDS = 60.0
RELEASE_SECONDS = 60.0
_ANSWER_SECONDS = 5.0
_PAUSE = 0.1
_LAST_MOMENTS = 0.005
"""Seconds between attempts to start a daemon: one that is ending keeps another one from starting."""
_FOR_REPLY = 0.25
"""Seconds before an evacuation's end at which the daemon begins its reply, at most a quarter of the time."""
_PASSING = ("daemon-gone", "daemon-ending", "run-busy")
"""Kinds of errors after which the next attempt may succeed."""
UNKNOWN = ("no-daemon", "not-claimed")
"""Kinds of errors that mean that no daemon has the run."""
_PACKAGES = Path(__file__).parents[2]


def start(folder: Path, variables: Mapping[str, str] | None = None) -> None:
    """Start a daemon for `folder`, unless one is running. Returns when it accepts connections.

    variables: more variables for its environment, which is otherwise this process's.

    Raises Unavailable (`kind` "daemon-not-started") with the daemon's message if it could not start.
    """
    # Without credentials for object stores: each session brings its own.
    inherited = {name: value for name, value in os.environ.items() if name not in PORTABLE}
    # The daemon has to import the same packages, including those from an edited `sys.path`.
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scarctl.daemon", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            # The daemon multiplies no matrices: threads of OpenBLAS would only use memory.
            env={**inherited, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", **(variables or {})},
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_started(folder, str(error)) from error
    if done.returncode:
        raise _not_started(folder, done.stderr.decode(errors="replace").strip()[-500:])


def connect(
    folder: Path,
    *,
    begin: bool = True,
    patience: float = START_SECONDS,
    variables: Mapping[str, str] | None = None,
) -> socket.socket:
    """Open a connection to the daemon of `folder`, within `patience` seconds. With `begin`, start it if necessary.

    variables: see `start`. It may take several starts, while an earlier daemon is about to end.

    Raises Unavailable if no daemon runs (`kind` "no-daemon") or it cannot be started; AccessDenied.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return protocol.connect(folder, REPLY_SECONDS)
        except BlockingIOError as error:
            missing: OSError = error  # a daemon is running, with too many waiting connections
            time.sleep(_PAUSE)
        except (FileNotFoundError, ConnectionError) as error:
            missing = error
            if begin:
                start(folder, variables)
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
    connection: socket.socket,
    op: str,
    *,
    patience: float = REPLY_SECONDS,
    warns: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Send a request to the daemon, and return its reply. Raises the error that the reply contains.

    warns: say at WARNING that there is no answer after a few seconds.

    Raises Unavailable (`kind` "daemon-gone") if no reply arrives within `patience` seconds. The connection must not be
    used after that.
    """
    try:
        connection.settimeout(patience)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reply may already be there
            protocol.send(connection, {"v": protocol.VERSION, "op": op, **fields})
        if warns and not protocol.readable(connection, _ANSWER_SECONDS):
            log.warning("%s", _silent(protocol.check_peer(connection), _ANSWER_SECONDS))
        reply = protocol.receive(connection, protocol.MAX_REPLY)
    except TimeoutError as error:
        raise _silent(protocol.check_peer(connection), patience, kind="daemon-gone") from error
    except (protocol.Closed, OSError) as error:
        raise gone() from error
    return protocol.check_reply(reply)


def ask(folder: Path, op: str, **fields: Any) -> dict[str, Any]:
    """Send one request to a running daemon. Raises Unavailable (`kind` "no-daemon") if no daemon runs."""
    with contextlib.closing(connect(folder, begin=False)) as connection:
        return request(connection, op, **fields)


def evacuate(
    folder: Path,
    run_id: str,
    seconds: float,
    to: str | None = None,
    *,
    ended: Callable[[], bool] = lambda: False,
) -> Evacuated:
    """Have the daemon evacuate a run within `seconds`: see `scarctl.persist.evacuation`. Return the report.

    to: see `Session.evacuate`.

    While the daemon is being replaced, or saving has not started, the request is repeated. Raises its last error when
    the time is over, or when no daemon knows the run and `ended` returns True. Raises Unavailable (`kind`
    "daemon-silent") if it does not answer in time.
    """
    from scarctl.persist.evacuated import Evacuated

    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            with contextlib.closing(connect(folder, begin=False, patience=left)) as connection:
                reply = request(
                    connection,
                    "evacuate",
                    patience=max(_PAUSE, left),
                    run=run_id,
                    to=to,
                    milliseconds=int((left - min(_FOR_REPLY, left / 4)) * 1000),
                )
            return Evacuated.from_json(reply.get("report"))
        except ScarError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise _late(folder) from error
            again = error.kind in (*_PASSING, *UNKNOWN, "not-saving")
            if not again or time.monotonic() + _PAUSE > deadline:
                raise
            if error.kind in UNKNOWN and ended():
                raise
        time.sleep(_PAUSE)


def ask_status(folder: Path, *, patience: float) -> DaemonStatus | None:
    """Return the status of the daemon, None if no daemon runs. Raises as `question` does."""
    return cast("DaemonStatus | None", question(folder, "status", patience=patience))


def question(folder: Path, op: str, *, patience: float) -> dict[str, Any] | None:
    """Send one request to the daemon, and return its reply, or None if no daemon runs or it has just ended.

    Raises Unavailable (`kind` "daemon-silent"), with the daemon's process id, if it does not answer within `patience`
    seconds.
    """
    try:
        connection = connect(folder, begin=False, patience=patience)
    except Unavailable as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise _silent(0, patience) from error  # the daemon accepts no connection at all
        if error.kind == "no-daemon":
            return None
        raise
    with contextlib.closing(connection):
        try:
            return request(connection, op, patience=patience)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                raise _silent(protocol.check_peer(connection), patience) from error
            if error.kind == "daemon-gone":
                return None
            raise


def hold(folder: Path, seconds: int, variables: Mapping[str, str] | None = None) -> int:
    """Have the daemon wait `seconds` for its first run. Start it if necessary. Returns its process id.

    variables: see `start`.
    """

    def attempt() -> int:
        with contextlib.closing(connect(folder, variables=variables)) as connection:
            return int(request(connection, "hold", seconds=seconds)["pid"])

    return insist(attempt)


def adopt(folder: Path, store: str, options: Mapping[str, Any], shard: int | None = None) -> None:
    """Have the daemon save the arena of a dead training process. Start it if necessary. Does not wait for the end.

    shard: that of the process, if the process was one of several ranks.

    Raises Contention if a process saves to the store, NoStore, AccessDenied, Unavailable.
    """

    def attempt() -> None:
        with contextlib.closing(connect(folder)) as connection:
            # The end of this connection is, to the daemon, the death of the training process.
            named = None if shard is None else {"shard": shard}
            request(connection, "claim", store=store, options=dict(options), part=named)

    insist(attempt)


def wait_until_released(folder: Path, run_id: str, seconds: float = RELEASE_SECONDS) -> None:
    """Wait until the daemon, if one runs, has saved the arena of a dead training process.

    Returns when the daemon has released the store, or has not claimed it. Raises Contention if a live process saves to
    it, or if the daemon is not ready after `seconds`; AccessDenied; and whatever `question` raises.
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
                f"{run['store']}: the daemon is still saving the copies of process {run['pid']}, which has ended{why}",
                hint="`scarctl daemon status` shows the progress; `daemon stop --store URL` leaves the rest in memory",
            )
        time.sleep(_PAUSE)


def insist(attempt: Callable[[], T]) -> T:
    """Repeat the attempt for some time while no daemon answers: one may be ending while another one starts.

    Raises other errors of `attempt` at once, and its last error when the time is over.
    """
    deadline, attempts = time.monotonic() + _INSIST_SECONDS, 0
    while True:
        try:
            return attempt()
        except ScarError as error:
            attempts += 1
            late = attempts >= _LEAST_ATTEMPTS and time.monotonic() > deadline
            if error.kind not in _PASSING or late:
                raise
        time.sleep(_PAUSE)


def gone() -> Unavailable:
    """Return the error for a daemon that has stopped answering."""
    return Unavailable("the daemon has ended", hint="a session starts another one", kind="daemon-gone")


def _silent(pid: int, patience: float, kind: str = "daemon-silent") -> Unavailable:
    return Unavailable(
        f"the daemon{f', process {pid},' if pid else ''} has not answered for {patience:g} s",
        hint="if it was stopped, SIGCONT continues it; killing it loses no copy in memory or in the store",
        kind=kind,
    )


def _late(folder: Path) -> Unavailable:
    return Unavailable(
        f"the daemon in {folder} did not answer before the deadline",
        hint="this host may be busy, or the daemon was stopped: SIGCONT continues it",
        kind="daemon-silent",
    )


def _not_started(folder: Path, reason: str) -> Unavailable:
    return Unavailable(
        f"the daemon in {folder} could not be started: {reason}",
        hint="daemon=False (SCARCTL_DAEMON=0) saves from the training process itself",
        kind="daemon-not-started",
    )
