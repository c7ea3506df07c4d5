"""Serve the host's daemon: one process per user that saves the memory of all runs, dead ones included.

It imports neither torch nor a training framework. Per run it maps the arena, holds the store's lock and epoch, and
drives a persister thread. `scarctl.daemon.lifecycle` decides when a run is released and when the daemon ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from scarctl.arena.stale import DAY, reap
from scarctl.config.checks import LONGEST_NOTICE
from scarctl.daemon import protocol
from scarctl.daemon.crowd import BACKLOG, listen, most_connections, turn_away
from scarctl.daemon.outlet import Outlet
from scarctl.daemon.request import Request
from scarctl.daemon.run import Run
from scarctl.daemon.runs import Runs
from scarctl.daemon.status import DaemonStatus, ReplicaStatus
from scarctl.daemon.trouble import Trouble
from scarctl.daemon.urgency import URGENT, Urgency
from scarctl.errors import ScarError, UsageError, error_fields
from scarctl.peers.host import Host
from scarctl.peers.sender import Source
from scarctl.store import Store
from scarctl.util.niceness import be_polite

log = logging.getLogger("scarctl")

_TICK = 0.1
_REAP_SECONDS = 3600.0
"""Time between two searches for arenas of dead runs."""
_PATIENCE = 10.0
"""Seconds that a peer may take to send a request."""
_FAREWELL = 2.0
"""Seconds to finish current replies when the daemon ends."""
_REQUESTS = "fsspecIO"
"""Name of the thread in which fsspec sends all requests to remote stores: it encrypts them, and computes checksums."""
_MAX_HOLD = 3600
_FOR_LOANS = 0.1
"""Part of an evacuation's time in which another host may still fetch the memory."""
_WARN_SECONDS = 60.0


class Daemon:
    """Serves the socket in `folder`, which is `<base>/scarctl-<uid>`, until `Lifecycle` ends the daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = time.time()
        self.runs = Runs(folder, lambda: self.host.busy, lambda: self.host.wanted())
        self.host = Host(folder, self.runs.lent, self.runs.lives)
        self._terminated = False
        self._warn_at = self._reap_at = 0.0
        self._peers: dict[threading.Thread, socket.socket] = {}
        self._peers_lock = threading.Lock()
        self._listener = listen(folder)
        self._outlet = Outlet(self._status, os.environ)
        self._urgency = Urgency(0)

    def terminate(self) -> None:
        """Release all runs, then end. The second call ends at once. For signal handlers: takes no lock.

        If the whole job receives SIGTERM, training processes die now. Their runs are saved first, within some time.
        """
        if self._terminated:
            os._exit(1)
        self._terminated = True

    def serve(self, *, alone: bool = False) -> None:
        """Accept connections until the daemon has no run left, or is asked to stop.

        alone: this process has a session of its own, and gives way to training: see `Urgency`.
        """
        self._urgency = Urgency(os.getpid() if alone else 0)
        self._listener.listen(
            BACKLOG
        )  # again, after the fork: peers see the id of the process that listened last
        self._listener.settimeout(_TICK)
        self._outlet.start()
        while not self.runs.ended.is_set():
            try:
                connection, _ = self._listener.accept()
                self._accept(connection)
            except TimeoutError:
                pass
            except (OSError, RuntimeError) as error:  # out of descriptors, or of threads
                self._warn("a connection was refused: %s", error)
                self.runs.ended.wait(_TICK)
            if self._terminated:
                self.host.hurry()
            self.runs.look_after(terminated=self._terminated)
            self._urgency.rest()
            self._reap()
        self._outlet.end()
        self._say_farewell()

    def _say_farewell(self) -> None:
        # The socket's file is removed first, so that no peer connects to an ending daemon.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / protocol.SOCKET)
        self._listener.close()
        self.host.close()
        with self._peers_lock:
            peers = dict(self._peers)
        for connection in peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # the current reply may still be sent
        deadline = time.monotonic() + _FAREWELL
        for thread in peers:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._converse, args=(connection,), name="scarctl-peer", daemon=True)
        try:
            with self._peers_lock:
                if len(self._peers) >= most_connections():
                    raise OSError(f"{most_connections()} connections are already open")
                thread.start()
                self._peers[thread] = connection
        except BaseException:
            turn_away(connection)
            raise

    def _reap(self) -> None:
        now = time.monotonic()
        if now < self._reap_at:
            return
        self._reap_at = now + _REAP_SECONDS
        live = frozenset(replica["id"] for replica in self.host.status())
        old = {"older_than": DAY, "live": live}
        with contextlib.suppress(RuntimeError):  # out of threads
            threading.Thread(
                target=reap, args=(self.folder,), kwargs=old, name="scarctl-reap", daemon=True
            ).start()

    # -- one connection -----------------------------------------------------------------------------------------

    def _converse(self, connection: socket.socket) -> None:
        """Answer one peer until it disconnects. No message of a peer ends the daemon by an exception."""
        peer = _Peer(connection)
        try:
            with connection:
                connection.settimeout(_PATIENCE)
                peer.pid = protocol.check_peer(connection)
                while True:
                    self._answer(connection, peer, protocol.receive(connection))
                    if peer.watched is not None:
                        self._watch(connection, peer.watched)
        except (protocol.Closed, OSError):
            pass  # the usual end
        except ScarError as error:
            self._warn("a peer was refused: %s", error)
        except Exception:
            log.exception("a peer's connection failed unexpectedly")
        finally:
            with self._peers_lock:
                self._peers.pop(threading.current_thread(), None)
            run = self.runs.owned(peer.run, peer)
            if run is not None:
                self.runs.lose(run)

    def _answer(self, connection: socket.socket, peer: _Peer, message: dict[str, Any]) -> None:
        name = message.get("op")
        try:
            if message.get("v") != protocol.VERSION and name not in protocol.EVERY_VERSION:
                raise UsageError(
                    f"the daemon uses version {protocol.VERSION} of its protocol, not {message.get('v')!r:.40}",
                    hint="`scarctl daemon stop --all` ends it; the next session starts a new one",
                    kind="daemon-version",
                )
            operation = _OPERATIONS.get(name) if isinstance(name, str) else None
            if operation is None:
                raise UsageError(f"unknown operation {name!r:.40}")
            with self._urgency.answering() if name in URGENT else contextlib.nullcontext():
                reply = {"ok": True, **(operation(self, peer, message) or {})}
        except ScarError as error:
            reply = protocol.failure(error)
        except Exception as error:
            log.exception("an operation failed unexpectedly")
            reply = protocol.failure(ScarError(f"the daemon failed: {error!r:.200}", kind="defect"))
        if name != "notify":
            protocol.send(connection, reply, protocol.MAX_REPLY)
        # A training process may be silent for any time.
        connection.settimeout(None if peer.run else _PATIENCE)

    def _watch(self, connection: socket.socket, run: Run) -> NoReturn:
        """Send a session its run's events until it disconnects. The end of the connection reports the daemon's end."""
        reported, trouble = False, Trouble()
        while not self.runs.ended.is_set():
            with contextlib.suppress(queue.Empty):
                protocol.send(connection, run.events.get(timeout=_TICK))
            thread, failed = run.saver.thread, run.saver.failure
            # After a pause a new thread has neither failed nor saved anything yet.
            known = thread is not None and (thread.last_error is not None or thread.stats.requests > 0)
            error = thread.last_error if thread is not None else None
            if failed is None and known and (news := trouble.look(error)) is not None:
                protocol.send(connection, news)
            if failed is not None and not reported:
                reported = True
                protocol.send(connection, {"failed": error_fields(failed)})
            if protocol.readable(connection):
                break  # a watching session sends nothing: this is the end of its connection
        raise protocol.Closed

    def _warn(self, text: str, error: Exception) -> None:
        """Log a warning, at most one per minute, so that bad peers do not fill the log."""
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + _WARN_SECONDS
            log.warning(text, error)

    # -- operations ---------------------------------------------------------------------------------------------

    def claim(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Claim a store for a training process."""
        with self.runs.staying():
            store = Store.open(protocol.text(message, "store"), storage_options=protocol.options(message))
            for thread in threading.enumerate():
                if thread.name == _REQUESTS:
                    be_polite(thread.native_id)
            part = protocol.part(message)
            if peer.run is not None:
                raise UsageError("this connection has already claimed a store")
            view = store if part is None else store.of_shard(part.shard, current=part.current)
            peer.run = self.runs.claim(view, peer.pid, peer).id

    def open(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Open the run. Its arena has to exist. Nothing is saved before `resume`."""
        return {"epoch": self._run(peer).open(again=message.get("again") is True)}

    def notify(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Wake the saver: a request was made."""
        self._run(peer).saver.notify()

    def drain(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Wait until all is durable."""
        saver = self._run(peer).saver
        durable = saver.drain(float(protocol.number(message, "milliseconds")) / 1000)
        return {"durable": durable, "fault": None if durable else error_fields(saver.fault())}

    def pause(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Write nothing to the store until `roll_back` or `resume`."""
        self._run(peer).saver.stop()

    def resume(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Continue saving after `pause`, or start it after `open`."""
        self._run(peer).saver.resume()

    def roll_back(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Roll the store back to one record."""
        seq = message.get("seq")
        if type(seq) is not int or not 0 < seq < 1 << 63:
            raise UsageError("roll_back needs a record's number")
        saver = self._run(peer).saver
        saver.roll_back(seq)
        return {"epoch": saver.epoch}

    def close(self, peer: _Peer, message: dict[str, Any]) -> None:
        """End the run of a training process that has finished. Wait for the store to be free, but not long."""
        with self.runs.changed:
            run = self._run(peer)
            run.closed = True
            peer.run = None
            self.runs.detach(run)

    def leave(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Continue saving as if the training process had died: it ends with requests that wait."""
        run = self._run(peer)
        peer.run = None
        self.runs.lose(run)

    def admit(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Take replicas of the other ranks' runs, at an address of this host. Returns the port."""
        run = self._run(peer)
        start, secret = protocol.secret(message)
        address, port = protocol.text(message, "address"), protocol.number(message, "port")
        tls = protocol.tls(message)
        rate = protocol.rate(message)
        runs, lasting = run.id.partition("-")[0], message.get("lasting") is True
        return {"port": self.host.admit(start, secret, runs, address, port, tls, rate, lasting=lasting)}

    def follow(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Send the run's arena to peers from now on."""
        run = self._run(peer)
        start, secret = protocol.secret(message)
        source = Source(
            run.id,
            run.store.where,
            protocol.text(message, "host"),
            start,
            secret,
            protocol.rate(message),
            protocol.tls(message),
            protocol.process(message),
        )
        run.send_to(source, protocol.candidates(message), protocol.number(message, "copies"))

    def links(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Return the copies of the run's memory on other hosts: see `Run.links`."""
        return {"links": self._run(peer).links()}

    def await_peers(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Wait until `count` peers have the run's memory of this moment."""
        seconds = min(protocol.number(message, "milliseconds") / 1000, _MAX_HOLD)
        have, links = self._run(peer).await_peers(protocol.number(message, "count"), seconds)
        return {"have": have, "links": links}

    def watch(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Use this connection for the events of a run from now on."""
        peer.watched = self.runs.known(protocol.text(message, "run"))
        if peer.watched is None:
            raise UsageError("there is no such run", kind="not-claimed")

    def brace(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Stay for some seconds, even after a SIGTERM, because the host is about to shut down."""
        self.runs.brace(min(protocol.number(message, "milliseconds") / 1000, LONGEST_NOTICE))

    def evacuate(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Evacuate a run, even a dead process's, to other hosts and the store within some time. Return the report."""
        seconds = min(protocol.number(message, "milliseconds") / 1000, LONGEST_NOTICE)
        run = self.runs.known(protocol.text(message, "run"))
        if run is None:
            raise UsageError("there is no such run", kind="not-claimed")
        self.runs.brace(seconds)
        to = protocol.text(message, "to") if message.get("to") is not None else None
        until = time.monotonic() + seconds
        with self.runs.kept(run.id, seconds * _FOR_LOANS):
            return {"report": run.evacuate(max(0.0, until - time.monotonic()), to).to_json()}

    def ask(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Pass a request on to a running session."""
        request = Request.from_json(message.get("request"))
        token = protocol.token(message)
        with self.runs.changed:
            run = self.runs.attached(protocol.text(message, "store"))
            return {"pid": run.pid, "number": run.ask(request, token)}

    def answer(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Keep a session's answer to a request."""
        answer = message.get("answer")
        if not isinstance(answer, dict):
            raise UsageError("an answer is an object")
        self._run(peer).answer(protocol.number(message, "number"), answer)

    def answered(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Return a session's answer to a request, if it has answered."""
        with self.runs.changed:
            run = self.runs.attached(protocol.text(message, "store"))
            return {"answer": run.answers.get(protocol.number(message, "number"))}

    def hold(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Stay for some seconds without a run: a training process is about to start."""
        seconds = min(protocol.number(message, "seconds"), _MAX_HOLD)
        self.runs.hold(seconds)
        return {"pid": os.getpid()}

    def status(self, peer: _Peer, message: dict[str, Any]) -> DaemonStatus:
        """Return the status that `scarctl daemon status` shows."""
        return self._status()

    def release(self, peer: _Peer, message: dict[str, Any]) -> None:
        """End the saving of a dead process's run once the current write has ended. See `Runs.release`."""
        self.runs.release(protocol.text(message, "run"))

    def stop(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """End the daemon once current writes have ended. Waiting requests stay in memory."""
        self.runs.stop()
        return {"pid": os.getpid()}

    def _status(self) -> DaemonStatus:
        return {
            "pid": os.getpid(),
            "started": self.started,
            "runs": self.runs.status(),
            "replicas": cast("list[ReplicaStatus]", self.host.status()),
            "claims": self.runs.claims,
            "metrics": self._outlet.describe(),
        }

    def _run(self, peer: _Peer) -> Run:
        run = self.runs.owned(peer.run, peer)
        if run is None:
            raise UsageError("claim a store first", kind="not-claimed")
        return run


class _Peer:
    """One connection: the process at its other end, and the run that it has claimed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = 0
        self.run: str | None = None
        self.watched: Run | None = None
        """The run whose events are sent over this connection; None without one."""

    def hung_up(self) -> bool:
        """See `Owner`."""
        return protocol.hung_up(self._connection)


_Operation = Callable[[Daemon, _Peer, dict[str, Any]], Mapping[str, Any] | None]
_OPERATIONS: dict[str, _Operation] = {
    "claim": Daemon.claim,
    "open": Daemon.open,
    "notify": Daemon.notify,
    "drain": Daemon.drain,
    "pause": Daemon.pause,
    "resume": Daemon.resume,
    "roll_back": Daemon.roll_back,
    "close": Daemon.close,
    "leave": Daemon.leave,
    "admit": Daemon.admit,
    "follow": Daemon.follow,
    "links": Daemon.links,
    "await_peers": Daemon.await_peers,
    "watch": Daemon.watch,
    "brace": Daemon.brace,
    "evacuate": Daemon.evacuate,
    "ask": Daemon.ask,
    "answer": Daemon.answer,
    "answered": Daemon.answered,
    "hold": Daemon.hold,
    "release": Daemon.release,
    "status": Daemon.status,
    "stop": Daemon.stop,
}
