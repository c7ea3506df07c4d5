"""Save through the host's daemon: the `Saver` of a session. If the daemon dies, another one is started."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scarctl.arena.arena import Arena
from scarctl.daemon import protocol
from scarctl.daemon.client import REPLY_SECONDS, ask, connect, evacuate, gone, insist, request
from scarctl.daemon.urgency import URGENT
from scarctl.errors import Corruption, Fenced, ScarError, error_from
from scarctl.persist.saver import Acknowledged
from scarctl.persist.thread import Current, late
from scarctl.store.store import Part
from scarctl.util.niceness import set_session

if TYPE_CHECKING:
    from scarctl.daemon.request import Request
    from scarctl.persist.evacuated import Evacuated

log = logging.getLogger("scarctl")

_SLICE = 5.0
"""Longest wait of one drain request, in seconds: no other request can be sent meanwhile."""
_MARGIN = 10.0
"""Seconds that a reply may come later than requested."""
_FAREWELL = 1.0
"""Seconds to wait for the daemon's reply when the training process leaves."""
_TROUBLE = 5.0
"""Seconds without a daemon after which the session is warned."""
_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


class DaemonSaver:
    """A `Saver` in the host's daemon. Saving continues if this process dies, and in a new daemon if the daemon dies."""

    outlives = True

    def __init__(
        self,
        store: str,
        run_id: str,
        folder: Path,
        on_request: Callable[[Request], None],
        options: Mapping[str, Any] | None = None,
        part: Part | None = None,
    ) -> None:
        """Prepare, without a connection.

        on_request: called from another thread when a command sends a request.

        options: options of the remote store's file system. They exist only in this process's and the daemon's memory.
        part: the shard that this process saves to, if it is one of several ranks.
        """
        self._store = store
        self._options = dict(options or {})
        self._part_of = protocol.part_fields(part)
        self._id = run_id
        self._folder = folder
        self._on_request = on_request
        self._arena: Arena | None = None
        # Held during a request and while a new daemon is started: `notify` must never wait for it.
        self._lock = threading.RLock()
        self._control: socket.socket | None = None
        self._watch: socket.socket | None = None
        self._closing, self._stopped = False, True
        self._failure: ScarError | None = None
        self._trouble: ScarError | None = None
        self._last: ScarError | None = None
        self._lost: ScarError | None = None
        """Why there is no connection."""
        self._copied: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The request for copies on peers, to repeat to the next daemon."""
        self._watcher = threading.Thread(target=self._look, name="scarctl-watch", daemon=True)
        _savers.add(self)

    def claim(self) -> None:
        """See `Saver`. Starts the daemon if necessary."""
        insist(self._connect)
        self._watcher.start()

    def open(self, arena: Arena) -> None:
        arena.begin_epoch(self._done("open")["epoch"], again=True)
        self._arena = arena

    def notify(self) -> None:
        """See `Saver`. Never waits, never fails: any daemon also looks for requests periodically."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            # A stopped process reads nothing: training must not wait for it.
            if self._control is not None and protocol.writable(self._control):
                protocol.send(self._control, {"v": protocol.VERSION, "op": "notify"})
        except OSError:
            pass  # the watching thread notices it, too
        finally:
            self._lock.release()

    def drain(self, timeout: float) -> bool:
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
            self._last = error_from(reply["fault"])
            if left == 0.0 or not self._last.retryable:
                return False
        return False

    def fault(self) -> ScarError:
        return self._failure or self._last or late()

    @property
    def failure(self) -> ScarError | None:
        return self._failure

    @property
    def trouble(self) -> ScarError | None:
        return self._trouble

    def stop(self) -> None:
        self._stopped = True  # first, so that a new daemon does not start saving either
        self._done("pause")

    def resume(self) -> None:
        self._stopped = False
        self._done("resume")

    def roll_back(self, seq: int) -> None:
        assert self._arena is not None
        reply = self._done("roll_back", seq=seq)
        self._arena.begin_epoch(reply["epoch"], again=True)

    def brace(self, seconds: float) -> None:
        """See `Saver`. A daemon that has received SIGTERM, too, then stays."""
        with contextlib.suppress(ScarError):  # a new daemon has received no signal
            ask(self._folder, "brace", patience=_FAREWELL, milliseconds=int(seconds * 1000))

    def evacuate(self, seconds: float, to: str | None = None) -> Evacuated:
        """See `Saver`. Uses a connection of its own, because other requests must not wait for it."""
        from scarctl.persist.evacuation import not_evacuated

        assert self._arena is not None
        try:
            return evacuate(self._folder, self._id, seconds, to)
        except ScarError as error:
            if error.kind == "unknown-host":
                raise
            return not_evacuated(self._arena, error)

    def answer(self, number: int, fields: Mapping[str, Any]) -> None:
        with contextlib.suppress(ScarError):  # without an answer the command ends after its timeout
            self._ask("answer", number=number, answer=dict(fields))

    def admit(
        self,
        start: str,
        secret: str,
        address: str,
        tls: Sequence[str] | None,
        rate: float | None = None,
        lasting: bool = False,
    ) -> int:
        """Have the daemon keep replicas of the other ranks' memory, and return the port at which it listens.

        start: name of this start of the job. secret: hex digits, which all ranks have. address: of this host.
        tls: see `Tls`. rate: bytes per second for each host that fetches from this one. lasting: see `Host.admit`.
        May be called again: with another address, or to learn the port of a daemon that has replaced another.
        Raises Unavailable if the daemon cannot listen there.
        """
        asked = {
            "start": start,
            "secret": secret,
            "address": address,
            "tls": tls,
            "rate": rate,
            "lasting": lasting,
        }
        before, followed = self._copied or ({}, {})
        port = int(self._done("admit", **asked, port=before.get("port", 0))["port"])
        self._copied = {**asked, "port": port}, followed
        return port

    def follow(
        self,
        host: str,
        peers: Sequence[Mapping[str, Any]],
        copies: int,
        rate: float | None,
        process: str = "",
    ) -> None:
        """Have the daemon keep copies of this run's memory on other hosts. Call it after `open` and `admit`.

        host: name of this host. peers: host, address and port of each candidate, best first. rate: bytes per second.
        process: see `Source`.
        May be called again: copies on hosts that stay are not sent again. Raises Contention during an evacuation.
        """
        assert self._copied is not None
        admitted, _ = self._copied
        asked = {
            "start": admitted["start"],
            "secret": admitted["secret"],
            "tls": admitted["tls"],
            "host": host,
            "peers": [dict(peer) for peer in peers],
            "copies": copies,
            "rate": rate,
            "process": process,
        }
        self._copied = admitted, asked
        self._done("follow", **asked)

    def links(self) -> list[dict[str, Any]]:
        """Return address, port, state (see `scarctl.peers.link.State`) and completeness of each copy of this memory."""
        return [dict(link) for link in self._ask("links")["links"]]

    def await_peers(self, count: int, timeout: float) -> Acknowledged:
        """See `Saver`. If the daemon has ended, also waits for its replacement."""
        deadline = time.monotonic() + timeout
        known = Acknowledged(0, ())
        while True:
            left = max(0.0, deadline - time.monotonic())
            part = min(left, _SLICE)
            try:
                reply = self._ask(
                    "await_peers", patience=part + _MARGIN, count=count, milliseconds=int(part * 1000)
                )
                # The last question may be too late to be answered, and asks for no more than an earlier one.
                known = Acknowledged(max(known.have, int(reply["have"])), tuple(reply["links"]))
            except ScarError as error:
                self._last = error
                if error.kind != "daemon-gone":
                    raise
            if known.have >= count or time.monotonic() >= deadline:
                return known
            time.sleep(min(_PAUSE, left))

    def leave(self) -> None:
        # The end of the connection has the same effect, so a daemon that does not answer is not waited for.
        self._part("leave", _FAREWELL)

    def close(self, current: Current = Current.FINISH) -> None:
        self._part("close", _SLICE + _MARGIN)

    def _part(self, op: str, patience: float) -> None:
        self._closing = True
        with contextlib.suppress(ScarError):
            # A daemon that has ended has released the store as well.
            self._ask(op, patience=patience)
        self._hang_up()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._disconnect()

    def abandon(self) -> None:
        """Give up in a forked child: the connections belong to the parent."""
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
            self._ask("claim", warns=True, store=self._store, options=self._options, part=self._part_of)
            self._watch = connect(self._folder)
            request(self._watch, "watch", run=self._id)
            self._watch.settimeout(None)
            self._lost = None

    def _disconnect(self) -> None:
        with self._lock:
            self._hang_up()
            for connection in (self._control, self._watch):
                if connection is not None:
                    connection.close()
            self._control = self._watch = None

    def _hang_up(self) -> None:
        """Wake every thread that waits for a reply of the daemon."""
        for connection in (self._control, self._watch):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, op: str, *, patience: float = REPLY_SECONDS, **fields: Any) -> dict[str, Any]:
        if not self._lock.acquire(timeout=patience):
            raise self._lost or gone()  # the watching thread is still starting another one
        try:
            if self._control is None:
                raise self._lost or gone()
            if op in URGENT:
                set_session(0, protocol.check_peer(self._control))
            return request(self._control, op, patience=patience, **fields)
        except ScarError as error:
            if error.kind == "not-claimed" and op != "claim":
                # An ending daemon has released this run already. Another daemon will continue it.
                self._disconnect()
                raise gone() from error
            if error.kind == "daemon-gone":
                self._disconnect()  # a late reply would be taken for the reply to the next request
                self._lost = error
            raise
        finally:
            self._lock.release()

    def _done(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request until a daemon answers. Only for requests that may be carried out twice.

        Raises the reason why no other daemon can continue, if one is known.
        """
        try:
            return insist(lambda: self._ask(op, **fields))
        except ScarError as error:
            if error.kind == "daemon-gone" and (trouble := self._trouble) is not None:
                raise trouble from error
            raise

    def _look(self) -> None:
        """Receive the daemon's events, and start another daemon when this one dies: the watching thread."""
        from scarctl.daemon.request import Request

        while not self._closing:
            watch = self._watch
            try:
                if watch is None:
                    raise protocol.Closed
                event = protocol.receive(watch, protocol.MAX_REPLY)
                if "failed" in event:
                    self._failure = error_from(event["failed"])
                elif "request" in event:
                    self._on_request(Request.from_json(event["request"]))
                elif "warn" in event:
                    log.warning("%s", event["warn"])
                elif "note" in event:
                    log.info("%s", event["note"])
            except (protocol.Closed, OSError, Corruption):
                self._begin_again()

    def _begin_again(self) -> None:
        """Start another daemon, and have it continue the run."""
        pause, since = 0.0, time.monotonic()
        while not self._closing:
            try:
                with self._lock:
                    if self._closing:
                        return
                    self._connect()
                    if self._arena is not None:
                        self._arena.begin_epoch(self._ask("open", again=True)["epoch"], again=True)
                        self._follow_again()  # first: an evacuation that waits for saving uses these copies, too
                        if not self._stopped:
                            self._ask("resume")
                    log.warning("the daemon has ended: another one continues")
                    self._trouble = None
                    return
            except ScarError as error:
                self._last = error
                # On a busy host the first attempt may reach the daemon that is just ending.
                if pause and time.monotonic() > since + _TROUBLE:
                    self._trouble = error
                self._disconnect()
                if isinstance(error, Fenced):
                    self._failure = error
                    self._closing = True
                if not pause:
                    log.warning("the daemon has ended, and another one cannot continue yet: %s", error)
            pause = min(_LONGEST_PAUSE, pause + _PAUSE)
            time.sleep(pause)

    def _follow_again(self) -> None:
        """Have the new daemon keep copies of memory, too. If it cannot, only the store gets further changes.

        Raises Unavailable (kind "daemon-gone") if the new daemon has ended, too.
        """
        if self._copied is None:
            return
        admitted, asked = self._copied
        try:
            self._ask("admit", **admitted)
            if asked:
                self._ask("follow", **asked)
        except ScarError as error:
            if error.kind == "daemon-gone":
                raise
            log.warning("other hosts no longer keep copies of this one's memory: %s", error)


_savers: weakref.WeakSet[DaemonSaver] = weakref.WeakSet()


def _after_fork() -> None:
    for saver in list(_savers):
        saver.abandon()


os.register_at_fork(after_in_child=_after_fork)
