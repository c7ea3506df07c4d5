"""The host's daemon: one process per user that makes hand-overs of all runs durable, also after their trainers died.

It imports neither torch nor a training framework. Per run it maps the arena, holds the store's lock and epoch, and
drives a persister thread; when to let a run go, and when to end, `scarctl.daemon.lifecycle` says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from scarctl.daemon import protocol
from scarctl.daemon.crowd import BACKLOG, full, listen, most_connections, most_sessions, turn_away
from scarctl.daemon.lifecycle import (
    Attached,
    Detached,
    Event,
    Exit,
    Held,
    Lifecycle,
    Phase,
    Release,
    Released,
    Settled,
    StopAsked,
    Terminated,
    Tick,
    TrainerGone,
)
from scarctl.daemon.run import Run
from scarctl.daemon.stale import DAY, reap
from scarctl.errors import Contention, ScarError, UsageError
from scarctl.store import Store
from scarctl.store.format import shard_of_folder
from scarctl.wishes import Wish

log = logging.getLogger("scarctl")

_TICK = 0.1
_LOOK_SECONDS = 1.0
"""A hand-over that nobody told of is found after this time."""
_REAP_SECONDS = 3600.0
"""Time between two looks for arenas that dead runs left."""
_PATIENCE = 10.0
"""Seconds that a peer may take to say what it wants, and that it waits for a run to be let go."""
_FAREWELL = 2.0
"""Seconds that answers under way get when the daemon ends."""
_MAX_HOLD = 3600
_WARN_SECONDS = 60.0


class Daemon:
    """Serves the socket in `folder`, which is `<base>/scarctl-<uid>`, until it has nothing to do any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = time.time()
        self._runs: dict[str, Run] = {}
        self._life = Lifecycle()
        # Held for moments only: what takes long (opening and letting go of a run) happens outside.
        self._changed = threading.Condition(threading.RLock())
        self._ending = threading.Event()
        self._terminated = False
        self._look_at = self._warn_at = self._reap_at = 0.0
        self._claiming = 0
        """Claims under way: a remote store takes longer to open than a daemon without runs lives."""
        self._peers: dict[threading.Thread, socket.socket] = {}
        self._listener = listen(folder)

    def terminate(self) -> None:
        """Let all runs go, then end: not before those that lose their training process now, as when the whole job gets
        a SIGTERM, are durable, which may take some time. The second time: end at once. For signal handlers: takes no
        lock.
        """
        if self._terminated:
            os._exit(1)
        self._terminated = True

    def serve(self) -> None:
        """Accept connections until the daemon has no run left, or is asked to stop."""
        self._listener.listen(BACKLOG)  # again, in this process: peers are told who did so last
        self._listener.settimeout(_TICK)
        while not self._ending.is_set():
            try:
                connection, _ = self._listener.accept()
                self._accept(connection)
            except TimeoutError:
                pass
            except (OSError, RuntimeError) as error:  # out of descriptors, or of threads
                self._warn("a connection cannot be served: %s", error)
                self._ending.wait(_TICK)
            self._look_after_runs()
        self._say_farewell()

    def _say_farewell(self) -> None:
        # The name goes first, so that nobody connects to a daemon that ends.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / protocol.SOCKET)
        self._listener.close()
        with self._changed:
            peers = dict(self._peers)
        for connection in peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # it may still get its answer
        deadline = time.monotonic() + _FAREWELL
        for thread in peers:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._converse, args=(connection,), name="scarctl-peer", daemon=True)
        try:
            with self._changed:
                if len(self._peers) >= most_connections():
                    raise OSError(f"there are {most_connections()} already")
                thread.start()
                self._peers[thread] = connection
        except BaseException:
            turn_away(connection)
            raise

    def _look_after_runs(self) -> None:
        now = time.monotonic()
        with self._changed:
            if self._terminated:
                self._apply(Terminated(now))
            for run in list(self._runs.values()):
                phase = self._life.runs[run.id]
                if phase is Phase.ATTACHED and not run.trainer_lives():
                    self._apply(TrainerGone(run.id))
                elif phase is Phase.ORPHANED and self._finished(run):
                    self._apply(Settled(run.id))
                if now >= self._look_at:
                    run.notify()
            if now >= self._look_at:
                self._look_at = now + _LOOK_SECONDS
            if not self._claiming:
                self._apply(Tick(now))
        if now >= self._reap_at:
            self._reap_at = now + _REAP_SECONDS
            with contextlib.suppress(RuntimeError):  # out of threads
                threading.Thread(
                    target=reap,
                    args=(self.folder,),
                    kwargs={"older_than": DAY},
                    name="scarctl-reap",
                    daemon=True,
                ).start()

    def _finished(self, run: Run) -> bool:
        try:
            return run.finish()
        except Exception as error:
            log.error("%s: saving cannot go on: %s", run.store.url, error)
            return True

    def _apply(self, event: Event) -> None:
        """Tell the state machine, and do what it says. The caller holds the lock."""
        if isinstance(event, TrainerGone):
            log.info("%s: its training process is gone", self._runs[event.run].store.url)
        for instruction in self._life.handle(event):
            if isinstance(instruction, Release):
                run = self._runs[instruction.run]
                threading.Thread(target=self._release, args=(run,), name="scarctl-release").start()
            elif isinstance(instruction, Exit):
                self._ending.set()

    def _release(self, run: Run) -> None:
        try:
            run.release()
            log.info("%s: let go", run.store.url)
        except Exception:
            log.exception("%s: could not be let go of properly", run.store.url)
        with self._changed:
            del self._runs[run.id]
            self._apply(Released(run.id))
            self._changed.notify_all()

    # -- one connection -----------------------------------------------------------------------------------------

    def _converse(self, connection: socket.socket) -> None:
        """Answer one peer until it goes. Nothing that it sends ends the daemon."""
        peer = _Peer()
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
            self._warn("a peer is turned away: %s", error)
        except Exception:
            log.exception("a peer's connection failed unexpectedly")
        finally:
            with self._changed:
                self._peers.pop(threading.current_thread(), None)
                run = self._runs.get(peer.run) if peer.run else None
            if run is not None and run.owner is peer:
                self._lose(run)

    def _lose(self, run: Run) -> None:
        """The training process of this run has ended its connection."""
        try:
            run.adopt()
        except Exception as error:
            log.error("%s: what is in memory cannot be saved: %s", run.store.url, error)
        with self._changed:
            if self._runs.get(run.id) is run:
                self._apply(TrainerGone(run.id))

    def _answer(self, connection: socket.socket, peer: _Peer, message: dict[str, Any]) -> None:
        name = message.get("op")
        try:
            if message.get("v") != protocol.VERSION:
                raise UsageError(
                    f"the daemon speaks version {protocol.VERSION} of its protocol, not {message.get('v')!r:.40}",
                    hint="`scarctl daemon stop` ends it; the next session starts a new one",
                    kind="daemon-version",
                )
            operation = _OPERATIONS.get(name) if isinstance(name, str) else None
            if operation is None:
                raise UsageError(f"unknown operation {name!r:.40}")
            reply = {"ok": True, **(operation(self, peer, message) or {})}
        except ScarError as error:
            reply = protocol.failure(error)
        except Exception as error:
            log.exception("an operation failed unexpectedly")
            reply = protocol.failure(ScarError(f"the daemon failed: {error!r:.200}", kind="defect"))
        if name != "notify":
            protocol.send(connection, reply, protocol.MAX_REPLY)
        # A training process says nothing for as long as it likes.
        connection.settimeout(None if peer.run else _PATIENCE)

    def _watch(self, connection: socket.socket, run: Run) -> NoReturn:
        """Tell a session what happens to its run, until it goes. The end of the connection tells it of ours."""
        told = False
        while not self._ending.is_set():
            with contextlib.suppress(queue.Empty):
                protocol.send(connection, run.events.get(timeout=_TICK))
            failed = run.failure
            if failed is not None and not told:
                told = True
                protocol.send(connection, {"failed": protocol.error_fields(failed)})
            if protocol.readable(connection):
                break  # it says nothing more: this is its end
        raise protocol.Closed

    def _warn(self, text: str, error: Exception) -> None:
        """Garbage must not fill the log."""
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + _WARN_SECONDS
            log.warning(text, error)

    # -- operations ---------------------------------------------------------------------------------------------

    def claim(self, peer: _Peer, message: dict[str, Any]) -> None:
        """A training process wants to save to a store."""
        with self._staying():
            store = Store.open(protocol.text(message, "store"), storage_options=protocol.options(message))
            part = protocol.part(message)
            self._claim(peer, store if part is None else store.of_shard(*part))

    def _claim(self, peer: _Peer, store: Store) -> None:
        if peer.run is not None:
            raise UsageError("this connection has claimed a store already")
        deadline = time.monotonic() + _PATIENCE
        with self._changed:
            while (known := self._runs.get(store.run_id)) is not None:
                if self._life.runs[store.run_id] is Phase.ATTACHED and known.trainer_lives():
                    raise Contention(
                        f"{store.url}: process {known.pid} is saving to this store",
                        hint="wait until it ends, or stop it; reading needs no lock",
                    )
                # Its training process has died: what it left goes on under the new one.
                known.put_off()
                self._apply(Detached(store.run_id))
                if not self._changed.wait(deadline - time.monotonic()):
                    raise Contention(
                        f"{store.url}: the daemon still writes what an earlier process left",
                        hint="try again in a while",
                        kind="run-busy",
                    )
            self._check_staying()
            if len(self._runs) >= most_sessions():
                raise full(most_sessions())
            store.lock()
            self._runs[store.run_id] = Run(store, self.folder / store.run_id, peer.pid, peer)
            peer.run = store.run_id
            self._apply(Attached(store.run_id))
        log.info("%s: process %d saves to it", store.url, peer.pid)

    def open(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """The run's arena is there: start saving."""
        again, stopped = message.get("again") is True, message.get("stopped") is True
        return {"epoch": self._run(peer).open(again=again, stopped=stopped)}

    def notify(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Something was handed over."""
        self._run(peer).notify()

    def drain(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Wait until all is durable."""
        run = self._run(peer)
        durable = run.drain(float(protocol.number(message, "milliseconds")) / 1000)
        return {"durable": durable, "fault": None if durable else protocol.error_fields(run.fault())}

    def pause(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Write nothing to the store until `roll_back` or `resume`."""
        self._run(peer).stop()

    def resume(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Go on after `pause`."""
        self._run(peer).resume()

    def roll_back(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Forget what came after some records."""
        seqs = message.get("seqs")
        if not isinstance(seqs, dict) or not all(
            shard_of_folder(k) is not None and type(v) is int for k, v in seqs.items()
        ):
            raise UsageError("roll_back needs a record's number for every shard")
        return {"epoch": self._run(peer).roll_back({int(k): v for k, v in seqs.items()})}

    def close(self, peer: _Peer, message: dict[str, Any]) -> None:
        """The training process has finished. Returns when the store is free, if that does not take too long."""
        with self._changed:
            run = self._run(peer)
            peer.run = None
            self._apply(Detached(run.id))
            self._changed.wait_for(lambda: self._runs.get(run.id) is not run, _PATIENCE)

    def leave(self, peer: _Peer, message: dict[str, Any]) -> None:
        """The training process goes, and something may wait: go on as if it had died."""
        run = self._run(peer)
        peer.run = None
        self._lose(run)

    def watch(self, peer: _Peer, message: dict[str, Any]) -> None:
        """From now on this connection tells what happens to a run."""
        with self._changed:
            peer.watched = self._runs.get(protocol.text(message, "run"))
        if peer.watched is None:
            raise UsageError("there is no such run", kind="not-claimed")

    def ask(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Somebody wants something of a running session."""
        wish = Wish.from_json(message.get("wish"))
        with self._changed:
            run = self._attached(message)
            return {"pid": run.pid, "number": run.ask(wish)}

    def answer(self, peer: _Peer, message: dict[str, Any]) -> None:
        """The session has fulfilled a wish, or cannot."""
        answer = message.get("answer")
        if not isinstance(answer, dict):
            raise UsageError("an answer is an object")
        self._run(peer).answer(protocol.number(message, "number"), answer)

    def answered(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Whether a session has said something to a wish."""
        with self._changed:
            return {"answer": self._attached(message).answers.get(protocol.number(message, "number"))}

    def _attached(self, message: dict[str, Any]) -> Run:
        name = protocol.text(message, "store")
        run = self._runs.get(name)
        if run is None or self._life.runs[name] is not Phase.ATTACHED:
            raise UsageError("no running session saves to this store on this host", kind="no-session")
        return run

    def hold(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """A training process is about to start: stay that many seconds, though there is no run yet."""
        seconds = min(protocol.number(message, "seconds"), _MAX_HOLD)
        with self._changed:
            self._check_staying()
            self._apply(Held(time.monotonic() + seconds))
        return {"pid": os.getpid()}

    def status(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """What `scarctl daemon status` shows."""
        with self._changed:
            runs = [(run, self._life.runs[run.id]) for run in self._runs.values()]
        return {
            "pid": os.getpid(),
            "started": self.started,
            "runs": [run.status(phase) for run, phase in runs],
        }

    def stop(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any]:
        """End the daemon when what is being written is done; what waits stays queued in the arenas."""
        with self._changed:
            self._apply(StopAsked())
        return {"pid": os.getpid()}

    @contextlib.contextmanager
    def _staying(self) -> Iterator[None]:
        with self._changed:
            self._check_staying()
            self._claiming += 1
        try:
            yield
        finally:
            with self._changed:
                self._claiming -= 1

    def _check_staying(self) -> None:
        if self._life.stopping:
            raise Contention("the daemon is ending", hint="try again", kind="daemon-ending")

    def _run(self, peer: _Peer) -> Run:
        with self._changed:
            run = self._runs.get(peer.run) if peer.run else None
            if run is None or run.owner is not peer:
                raise UsageError("claim a store first", kind="not-claimed")
            return run


class _Peer:
    """One connection: the process at its other end, and the run that it has claimed."""

    def __init__(self) -> None:
        self.pid = 0
        self.run: str | None = None
        self.watched: Run | None = None
        """The run whose events go to this connection, if that is what it is for."""


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
    "leave": Daemon.leave,
    "watch": Daemon.watch,
    "ask": Daemon.ask,
    "answer": Daemon.answer,
    "answered": Daemon.answered,
    "hold": Daemon.hold,
    "status": Daemon.status,
    "stop": Daemon.stop,
}
