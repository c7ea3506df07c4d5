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
from typing import Any

from scarctl.daemon import protocol
from scarctl.daemon.arena import Arena
from scarctl.errors import Fenced, ScarError, Unavailable, by_kind

log = logging.getLogger("scarctl")

START_SECONDS = 20.0
"""A daemon that does not answer by then, on a busy host, counts as not startable."""
REPLY_SECONDS = 60.0
_PAUSE = 0.2
_PACKAGES = Path(__file__).parents[2]


def start(folder: Path) -> None:
    """Start a daemon for `folder`, unless there is one. Returns when it accepts connections.

    Raises Unavailable with what it said when it could not start.
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
            env={**os.environ, "PYTHONPATH": path},
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_started(folder, str(error)) from error
    if done.returncode:
        raise _not_started(folder, done.stderr.decode(errors="replace").strip()[-500:])


def connect(folder: Path, *, begin: bool = True) -> socket.socket:
    """A connection to the daemon of `folder`, started if need be (`begin`).

    Raises Unavailable when there is none and it cannot be started; AccessDenied.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return protocol.connect(folder, REPLY_SECONDS)
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError) as error:
            missing: Exception = error
        except Unavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            missing = error  # not even the folder is there
        if not begin or time.monotonic() > deadline:
            raise Unavailable(
                "no daemon is running on this host",
                hint="`scarctl daemon start` starts one",
                kind="no-daemon",
            ) from missing
        start(folder)


def request(connection: socket.socket, op: str, **fields: Any) -> dict[str, Any]:
    """Ask the daemon; returns its reply. Raises the error that it replies with; Unavailable when it has gone."""
    try:
        protocol.send(connection, {"v": protocol.VERSION, "op": op, **fields})
        return protocol.check_reply(protocol.receive(connection))
    except (protocol.Closed, OSError) as error:
        raise Unavailable("the daemon has gone", hint="it is started again", kind="daemon-gone") from error


def ask(folder: Path, op: str, **fields: Any) -> dict[str, Any]:
    """One question to a daemon that is running. Raises Unavailable (`kind` "no-daemon") when there is none."""
    with contextlib.closing(connect(folder, begin=False)) as connection:
        return request(connection, op, **fields)


class DaemonSaver:
    """Saves in the host's daemon: goes on when this process dies, and in a new daemon when that one dies."""

    def __init__(self, store: str, store_id: str, folder: Path, on_request: Callable[[bool], None]) -> None:
        """`on_request(full)` is called, from another thread, when somebody asks for a checkpoint now."""
        self._store = store
        self._id = store_id
        self._folder = folder
        self._on_request = on_request
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._control: socket.socket | None = None
        self._watch: socket.socket | None = None
        self._closing = False
        self._failure: ScarError | None = None
        self._last: ScarError | None = None
        self._watcher = threading.Thread(target=self._look, name="scarctl-watch", daemon=True)
        _savers.add(self)

    def claim(self) -> None:
        """See `Saver`. Starts the daemon if need be."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._connect()
                break
            except ScarError as error:
                # It was just ending when we came: there will be a new one.
                if error.kind not in ("daemon-gone", "daemon-ending") or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
        self._watcher.start()

    def open(self, arena: Arena) -> None:
        """See `Saver`."""
        again, self._arena = self._arena is not None, arena
        arena.epoch = self._ask("open", again=again)["epoch"]

    def notify(self) -> None:
        """See `Saver`. Never waits, never fails: a new daemon looks at the queue by itself."""
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None:
                protocol.send(self._control, {"v": protocol.VERSION, "op": "notify"})

    def drain(self, timeout: float) -> bool:
        """See `Saver`."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                reply = self._ask("drain", milliseconds=int(min(left, REPLY_SECONDS / 2) * 1000))
            except ScarError as error:
                if error.kind != "daemon-gone" or left == 0.0:
                    self._last = error
                    return False
                time.sleep(min(_PAUSE, left))
                continue
            if reply["durable"]:
                return True
            self._last = _error(reply["fault"])
            if left == 0.0 or not self._last.retryable:
                return False

    def fault(self) -> ScarError:
        """See `Saver`."""
        return self._failure or self._last or Unavailable("the store is slower than the time given")

    @property
    def failure(self) -> ScarError | None:
        """See `Saver`."""
        return self._failure

    def stop(self) -> None:
        """See `LocalSaver.stop`."""
        self._ask("pause")

    def resume(self) -> None:
        """See `LocalSaver.resume`."""
        self._ask("resume")

    def roll_back(self, seqs: Mapping[int, int]) -> None:
        """See `Saver`."""
        assert self._arena is not None
        self._arena.epoch = self._ask("roll_back", seqs={str(k): v for k, v in seqs.items()})["epoch"]

    def close(self) -> None:
        """See `Saver`."""
        self._closing = True
        with contextlib.suppress(ScarError):
            self._ask("close")  # a daemon that has gone has let go of the store as well
        self._disconnect()
        if self._watcher.ident is not None:
            self._watcher.join()

    def abandon(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._closing = True
        for connection in (self._control, self._watch):
            if connection is not None:
                os.close(connection.detach())

    # -- connections --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        with self._lock:
            self._disconnect()
            self._control = connect(self._folder)
            request(self._control, "claim", store=self._store, pid=os.getpid())
            self._watch = connect(self._folder)
            self._watch.settimeout(None)
            request(self._watch, "watch", run=self._id)

    def _disconnect(self) -> None:
        for connection in (self._control, self._watch):
            if connection is not None:
                # A thread that reads from it has to wake up.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        self._control = self._watch = None

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        with self._lock:
            if self._control is None:
                raise Unavailable("the daemon has gone", hint="it is started again", kind="daemon-gone")
            return request(self._control, op, **fields)

    def _look(self) -> None:
        """The watcher: takes the daemon's events, and starts another daemon when this one dies."""
        while not self._closing:
            watch = self._watch
            try:
                if watch is None:
                    raise protocol.Closed
                event = protocol.receive(watch)
            except (protocol.Closed, OSError, ScarError):
                if not self._closing:
                    self._again()
                continue
            if "failed" in event:
                self._failure = _error(event["failed"])
            elif "checkpoint" in event:
                self._on_request(event["checkpoint"] == "full")

    def _again(self) -> None:
        log.warning("the daemon has gone: starting another")
        try:
            self._connect()
            if self._arena is not None:
                self.open(self._arena)
        except ScarError as error:
            self._last = error
            if isinstance(error, Fenced):
                self._failure = error
                self._closing = True
            with self._lock:
                self._disconnect()
            time.sleep(_PAUSE)


def _error(fields: Any) -> ScarError:
    if not isinstance(fields, dict):
        return Unavailable("the daemon gives no reason")
    kind = str(fields.get("kind"))
    return by_kind(kind)(str(fields.get("message")), hint=str(fields.get("hint")), kind=kind)


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
