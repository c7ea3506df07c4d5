"""Talking to the host's daemon: starting it, asking it, and a session's `Saver` that lives in it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from scarctl.daemon import protocol
from scarctl.daemon.arena import Arena
from scarctl.errors import Corruption, Fenced, ScarError, Unavailable

log = logging.getLogger("scarctl")
T = TypeVar("T")

START_SECONDS = 20.0
"""A daemon that does not answer by then, on a busy host, counts as not startable."""
REPLY_SECONDS = 60.0
_SLICE = 5.0
"""Seconds that one question to drain waits: it keeps the connection busy."""
_MARGIN = 10.0
"""Seconds that an answer may come later than asked for."""
_PAUSE = 0.1
_LAST_MOMENTS = 0.005
"""One that is just ending keeps others from starting: not to be tried all the time."""
_LONGEST_PAUSE = 2.0
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
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_started(folder, str(error)) from error
    if done.returncode:
        raise _not_started(folder, done.stderr.decode(errors="replace").strip()[-500:])


def connect(folder: Path, *, begin: bool = True) -> socket.socket:
    """A connection to the daemon of `folder`, started if need be (`begin`).

    Raises Unavailable when there is none (`kind` "no-daemon") or it cannot be started; AccessDenied.
    """
    deadline = time.monotonic() + START_SECONDS
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
        protocol.send(connection, {"v": protocol.VERSION, "op": op, **fields})
        reply = protocol.receive(connection, protocol.MAX_REPLY)
    except (protocol.Closed, OSError) as error:
        raise _gone() from error
    return protocol.check_reply(reply)


def ask(folder: Path, op: str, **fields: Any) -> dict[str, Any]:
    """One question to a daemon that is running. Raises Unavailable (`kind` "no-daemon") when there is none."""
    with contextlib.closing(connect(folder, begin=False)) as connection:
        return request(connection, op, **fields)


def hold(folder: Path, seconds: int) -> int:
    """Have a daemon, started if need be, that waits that long for its first run; returns its process id."""

    def attempt() -> int:
        with contextlib.closing(connect(folder)) as connection:
            return int(request(connection, "hold", seconds=seconds)["pid"])

    return _insist(attempt)


class DaemonSaver:
    """Saves in the host's daemon: goes on when this process dies, and in a new daemon when that one dies."""

    def __init__(self, store: str, store_id: str, folder: Path, on_request: Callable[[bool], None]) -> None:
        """`on_request(full)` is called, from another thread, when somebody asks for a checkpoint now."""
        self._store = store
        self._id = store_id
        self._folder = folder
        self._on_request = on_request
        self._arena: Arena | None = None
        # Held while a question is answered and while a new daemon is started: never to be waited for by `notify`.
        self._lock = threading.RLock()
        self._control: socket.socket | None = None
        self._watch: socket.socket | None = None
        self._closing = self._stopped = False
        self._failure: ScarError | None = None
        self._last: ScarError | None = None
        self._watcher = threading.Thread(target=self._look, name="scarctl-watch", daemon=True)
        _savers.add(self)

    def claim(self) -> None:
        """See `Saver`. Starts the daemon if need be."""
        _insist(self._connect)
        self._watcher.start()

    def open(self, arena: Arena) -> None:
        """See `Saver`."""
        arena.epoch = self._done("open")["epoch"]
        self._arena = arena

    def notify(self) -> None:
        """See `Saver`. Never waits, never fails: the daemon, also a new one, looks at the queue by itself as well."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            # A daemon that was stopped reads nothing: training must not wait for it.
            if self._control is not None and protocol.writable(self._control):
                protocol.send(self._control, {"v": protocol.VERSION, "op": "notify"})
        except OSError:
            pass  # the watcher sees it, too
        finally:
            self._lock.release()

    def drain(self, timeout: float) -> bool:
        """See `Saver`."""
        deadline = time.monotonic() + timeout
        while self._failure is None:
            left = max(0.0, deadline - time.monotonic())
            part = min(left, _SLICE)
            try:
                reply = self._ask("drain", patience=part + _MARGIN, milliseconds=int(part * 1000))
            except ScarError as error:
                self._last = error
                if error.kind != "daemon-gone" or left == 0.0:
                    return False
                time.sleep(min(_PAUSE, left))
                continue
            if reply["durable"] is True:
                return True
            self._last = protocol.error_from(reply["fault"])
            if left == 0.0 or not self._last.retryable:
                return False
        return False

    def fault(self) -> ScarError:
        """See `Saver`."""
        return self._failure or self._last or Unavailable("the store is slower than the time given")

    @property
    def failure(self) -> ScarError | None:
        """See `Saver`."""
        return self._failure

    def stop(self) -> None:
        """See `Saver`."""
        self._stopped = True  # from here on for a new daemon as well
        self._done("pause")

    def resume(self) -> None:
        """See `Saver`."""
        self._stopped = False
        self._done("resume")

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """See `Saver`."""
        assert self._arena is not None
        self._arena.epoch = self._done("roll_back", seqs={str(k): v for k, v in seqs.items()})["epoch"]

    def close(self) -> None:
        """See `Saver`."""
        self._end("close")

    def leave(self) -> None:
        """See `Saver`."""
        self._end("leave")

    def _end(self, op: str) -> None:
        self._closing = True
        with contextlib.suppress(ScarError):
            # A daemon that has gone has let go of the store as well.
            self._ask(op, patience=_SLICE + _MARGIN)
        self._hang_up()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._disconnect()

    def abandon(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._closing = True
        for connection in (self._control, self._watch):
            if connection is not None:
                os.close(connection.detach())
        self._control = self._watch = None

    # -- connections --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        with self._lock:
            self._disconnect()
            self._control = connect(self._folder)
            self._ask("claim", store=self._store)
            self._watch = connect(self._folder)
            request(self._watch, "watch", run=self._id)
            self._watch.settimeout(None)

    def _disconnect(self) -> None:
        with self._lock:
            self._hang_up()
            for connection in (self._control, self._watch):
                if connection is not None:
                    connection.close()
            self._control = self._watch = None

    def _hang_up(self) -> None:
        """Wake up every thread that waits for the daemon's answer."""
        for connection in (self._control, self._watch):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, op: str, *, patience: float = REPLY_SECONDS, **fields: Any) -> dict[str, Any]:
        if not self._lock.acquire(timeout=patience):
            raise _gone()  # another one is still being started
        try:
            if self._control is None:
                raise _gone()
            return request(self._control, op, patience=patience, **fields)
        except ScarError as error:
            if error.kind == "daemon-gone":
                self._disconnect()  # its answer may still come, and would be taken for another one
            raise
        finally:
            self._lock.release()

    def _done(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask until a daemon answers. All that is asked this way may be done twice."""
        return _insist(lambda: self._ask(op, **fields))

    def _look(self) -> None:
        """The watcher: takes the daemon's events, and starts another daemon when this one dies."""
        while not self._closing:
            watch = self._watch
            try:
                if watch is None:
                    raise protocol.Closed
                event = protocol.receive(watch, protocol.MAX_REPLY)
                if "failed" in event:
                    self._failure = protocol.error_from(event["failed"])
                elif "checkpoint" in event:
                    self._on_request(event["checkpoint"] == "full")
            except (protocol.Closed, OSError, Corruption):
                self._begin_again()

    def _begin_again(self) -> None:
        """Have another daemon go on with the run."""
        pause = 0.0
        while not self._closing:
            try:
                with self._lock:
                    if self._closing:
                        return
                    self._connect()
                    if self._arena is not None:
                        reply = self._ask("open", again=True, stopped=self._stopped)
                        self._arena.epoch = reply["epoch"]
                    log.warning("the daemon had gone: another one goes on")
                    return
            except ScarError as error:
                self._last = error
                self._disconnect()
                if isinstance(error, Fenced):
                    self._failure = error
                    self._closing = True
                if not pause:
                    log.warning("the daemon has gone, another one cannot go on yet: %s", error)
            pause = min(_LONGEST_PAUSE, pause + _PAUSE)
            time.sleep(pause)


def _insist(attempt: Callable[[], T]) -> T:
    """Try until a daemon answers, for some time: one may just be ending, and there will be a new one."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return attempt()
        except ScarError as error:
            if error.kind not in ("daemon-gone", "daemon-ending") or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE)


def _gone() -> Unavailable:
    return Unavailable("the daemon has gone", hint="a session starts another one", kind="daemon-gone")


def _not_started(folder: Path, reason: str) -> Unavailable:
    return Unavailable(
        f"the daemon in {folder} could not be started: {reason}",
        hint="daemon=False (SCARCTL_DAEMON=0) saves from the training process itself",
        kind="daemon-not-started",
    )


_savers: weakref.WeakSet[DaemonSaver] = weakref.WeakSet()


def _after_fork() -> None:
    for saver in list(_savers):
        saver.abandon()


os.register_at_fork(after_in_child=_after_fork)
