"""The host's daemon: one process per user that makes hand-overs of all runs durable, also after their trainers died.

It imports neither torch nor a training framework. Per run it maps the arena, holds the store's lock and epoch, and
drives a persister thread; when to let a run go, and when to end, `scarctl.daemon.lifecycle` says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scarctl.daemon import protocol
from scarctl.daemon.lifecycle import (
    Attached,
    Detached,
    Event,
    Exit,
    Lifecycle,
    Phase,
    Release,
    Settled,
    StopAsked,
    Tick,
    TrainerGone,
)
from scarctl.daemon.run import Run
from scarctl.errors import Contention, ScarError, UsageError
from scarctl.store import Store

log = logging.getLogger("scarctl")

_TICK = 0.1
_MAX_CONNECTIONS = 1024


class Daemon:
    """Serves the socket in `folder`, which is `<base>/scarctl-<uid>`, until it has nothing to do any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = time.time()
        self._runs: dict[str, Run] = {}
        self._life = Lifecycle()
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._listener = _listen(folder)
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def serve(self) -> None:
        """Accept connections until the daemon has no run left, or is asked to stop."""
        self._listener.settimeout(_TICK)
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._accept(connection)
            self._look_after_runs()
        # The name goes first, so that nobody connects to a daemon that ends.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / protocol.SOCKET)
        self._listener.close()

    def _accept(self, connection: socket.socket) -> None:
        if not self._connections.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._converse, args=(connection,), name="scarctl-peer", daemon=True).start()

    def _look_after_runs(self) -> None:
        with self._lock:
            for run in list(self._runs.values()):
                phase = self._life.runs.get(run.id)
                if phase is Phase.ATTACHED and not run.trainer_lives():
                    self._apply(TrainerGone(run.id, durable=run.orphan()))
                elif phase is Phase.ORPHANED and run.settled():
                    self._apply(Settled(run.id))
            self._apply(Tick(time.monotonic()))

    def _apply(self, event: Event) -> None:
        for instruction in self._life.handle(event):
            if isinstance(instruction, Release):
                run = self._runs.pop(instruction.run, None)
                if run is not None:
                    run.release()
            elif isinstance(instruction, Exit):
                self._ending.set()

    # -- one connection -----------------------------------------------------------------------------------------

    def _converse(self, connection: socket.socket) -> None:
        """Answer one peer until it goes. Nothing that it sends ends the daemon."""
        peer = _Peer()
        try:
            with connection:
                protocol.check_peer(connection)
                while True:
                    self._answer(connection, peer, protocol.receive(connection))
        except (protocol.Closed, OSError):
            pass  # the usual end
        except ScarError as error:
            log.warning("a peer is turned away: %s", error)
        except Exception:
            log.exception("a peer's connection failed unexpectedly")
        finally:
            self._connections.release()
            self._gone(peer)

    def _answer(self, connection: socket.socket, peer: _Peer, message: dict[str, Any]) -> None:
        name = message.get("op")
        try:
            if message.get("v") != protocol.VERSION:
                raise UsageError(
                    f"the daemon speaks version {protocol.VERSION} of its protocol, not {message.get('v')!r}",
                    hint="`scarctl daemon stop` ends it after its last run; the next session starts a new one",
                    kind="daemon-version",
                )
            if name == "watch":
                self._watch(connection, _text(message, "run"))
                return
            operation = _OPERATIONS.get(name) if isinstance(name, str) else None
            if operation is None:
                raise UsageError(f"unknown operation {name!r:.40}")
            reply = {"ok": True, **(operation(self, peer, message) or {})}
        except ScarError as error:
            reply = protocol.failure(error)
        if name != "notify":
            protocol.send(connection, reply)

    def _watch(self, connection: socket.socket, run_id: str) -> None:
        """Tell a session what happens to its run, until it goes. The end of the connection tells it of ours."""
        protocol.send(connection, {"ok": True})
        with self._lock:
            run = self._runs.get(run_id)
        told = False
        while run is not None and not self._ending.is_set():
            with contextlib.suppress(queue.Empty):
                protocol.send(connection, run.events.get(timeout=_TICK))
            failed = run.failure
            if failed is not None and not told:
                told = True
                protocol.send(connection, {"failed": protocol.failure(failed)["error"]})
            if select.select([connection], [], [], 0)[0]:
                break  # it says nothing more: this is its end
        raise protocol.Closed

    def _gone(self, peer: _Peer) -> None:
        with self._lock:
            run = self._runs.get(peer.run) if peer.run else None
            if run is not None and run.owner is peer:
                self._apply(TrainerGone(run.id, durable=run.orphan()))

    # -- operations ---------------------------------------------------------------------------------------------

    def claim(self, peer: _Peer, message: dict[str, Any]) -> None:
        """A training process wants to save to a store."""
        store = Store.open(_text(message, "store"))
        pid = _number(message, "pid")
        with self._lock:
            if self._ending.is_set():
                raise Contention("the daemon is ending", hint="try again", kind="daemon-ending")
            known = self._runs.get(store.id)
            if known is not None:
                if self._life.runs.get(store.id) is Phase.ATTACHED and known.trainer_lives():
                    raise Contention(
                        f"{store.url}: process {known.pid} is saving to this store",
                        hint="wait until it ends, or stop it; reading needs no lock",
                    )
                # Its trainer has died: what it left goes on under the new one.
                self._apply(Detached(store.id))
            store.lock()
            self._runs[store.id] = Run(store, self.folder / store.id, pid, peer)
            peer.run = store.id
            self._apply(Attached(store.id))

    def open(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """The run's arena is there: start saving."""
        return {"epoch": self._run(peer).open(again=message.get("again") is True)}

    def notify(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Something was handed over."""
        self._run(peer).notify()

    def drain(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Wait until all is durable."""
        run = self._run(peer)
        durable = run.drain(float(_number(message, "milliseconds")) / 1000)
        return {"durable": durable, "fault": None if durable else protocol.failure(run.fault())["error"]}

    def pause(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Write nothing to the store until `roll_back` or `resume`."""
        self._run(peer).stop()

    def resume(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Go on after `pause`."""
        self._run(peer).resume()

    def roll_back(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Forget what came after some records."""
        seqs = message.get("seqs")
        if not isinstance(seqs, dict) or not all(k.isdecimal() and type(v) is int for k, v in seqs.items()):
            raise UsageError("roll_back needs a record's number for every shard")
        return {"epoch": self._run(peer).roll_back({int(k): v for k, v in seqs.items()})}

    def close(self, peer: _Peer, message: dict[str, Any]) -> None:
        """The training process has finished."""
        with self._lock:
            run = self._run(peer)
            peer.run = None
            self._apply(Detached(run.id))

    def ask(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Somebody wants a running session to save now."""
        store, full = _text(message, "store"), message.get("full") is True
        with self._lock:
            run = self._runs.get(store)
            if run is None or self._life.runs.get(store) is not Phase.ATTACHED:
                raise UsageError("no running session saves to this store on this host", kind="no-session")
            run.events.put({"checkpoint": "full" if full else "partial"})
            return {"pid": run.pid}

    def status(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """What `scarctl daemon status` shows."""
        with self._lock:
            runs = [run.status(self._life.runs[run.id].value) for run in self._runs.values()]
        return {"pid": os.getpid(), "started": self.started, "runs": runs}

    def stop(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """End the daemon; what waits stays queued in the arenas."""
        with self._lock:
            waiting = sum(1 for run in self._runs.values() if not run.settled())
            self._apply(StopAsked())
        return {"unsettled_runs": waiting}

    def _run(self, peer: _Peer) -> Run:
        with self._lock:
            run = self._runs.get(peer.run) if peer.run else None
            if run is None or run.owner is not peer:
                raise UsageError("claim a store first", kind="not-claimed")
            return run


class _Peer:
    """One connection, and the run that it has claimed."""

    def __init__(self) -> None:
        self.run: str | None = None


_Operation = Callable[[Daemon, _Peer, dict[str, Any]], dict[str, Any] | None]
_OPERATIONS: dict[str, _Operation] = {
    "claim": Daemon.claim,
    "open": Daemon.open,
    "notify": Daemon.notify,
    "drain": Daemon.drain,
    "pause": Daemon.pause,
    "resume": Daemon.resume,
    "roll_back": Daemon.roll_back,
    "close": Daemon.close,
    "ask": Daemon.ask,
    "status": Daemon.status,
    "stop": Daemon.stop,
}


def _text(message: dict[str, Any], key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} must be a text")
    return value


def _number(message: dict[str, Any], key: str) -> int:
    value = message.get(key)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise UsageError(f"{key} must be a whole number")
    return value


def _listen(folder: Path) -> socket.socket:
    """The socket, bound and listening. The caller holds the daemon's lock, so an old socket file is nobody's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / protocol.SOCKET)
        with protocol.short_path(folder) as path, _private():
            listener.bind(path)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _private() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
