"""Keep replicas of other hosts: listen for their daemons, require a proof, and write the copies that they send.

Hosts that fetch an arena are passed on to `scarctl.peers.lender`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena.owner import Owner
from scarctl.arena.stale import has_unsaved
from scarctl.errors import AccessDenied, Contention, Corruption, ScarError, Unavailable
from scarctl.peers.channel import REPLY_SECONDS, STRANGER_SECONDS, Channel, Gone, readable, unknown_start
from scarctl.peers.follower import most_body
from scarctl.peers.frames import (
    MAX_BODY,
    Kind,
    decode_batch,
    decode_mark,
    encode,
    hex_of,
    number_of,
    text_of,
)
from scarctl.peers.handshake import VERSION, Hello, challenge, verify
from scarctl.peers.lender import Lend, Lender, lent_without_runs
from scarctl.peers.replica import Replica, require_epoch, require_newest, sweep
from scarctl.peers.tls import Tls
from scarctl.state.version import MAX_EPOCH
from scarctl.util.arrays import Bytes
from scarctl.util.niceness import be_polite

log = logging.getLogger("scarctl")

_MOST_STRANGERS = 64
"""Most connections without a proof at one time."""
_WARN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, repr=False)
class _Start:
    """A start of a job whose daemons are admitted. Never displayed, because it has the secret."""

    name: str
    secret: bytes
    files: tuple[str, ...] | None
    """Files for TLS, if its links use it."""
    rate: float | None
    """Most bytes per second that this host sends to one that fetches; None: no limit."""
    lasting: bool
    """Whether a later start has the secret, too."""


@dataclass(slots=True)
class _Listener:
    socket: socket.socket
    tls: Tls | None

    @property
    def files(self) -> tuple[str, ...] | None:
        return None if self.tls is None else self.tls.files


class Host:
    """The replicas that one daemon keeps. The socket opens with the first start of a job that requests it."""

    def __init__(
        self, folder: Path, lend: Lend = lent_without_runs, lives: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Prepare, without a socket. folder: folder of the daemon. lend, lives: see `Lender`."""
        self._folder = folder
        self._lender = Lender(folder, lend, lives)
        self._lock = threading.Lock()
        self._starts: dict[str, _Start] = {}
        """Starts by the common prefix of their runs' ids. Copies of one store have the same start at several places."""
        self._listeners: dict[tuple[str, int], _Listener] = {}
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._writing: dict[str, tuple[Channel, threading.Thread, Replica | None]] = {}
        """Connection, thread and replica, by run."""
        self._closing = False
        self._warn_at = 0.0

    def admit(
        self,
        start: str,
        secret: bytes,
        runs: str,
        address: str,
        port: int,
        tls: Tls | None = None,
        rate: float | None = None,
        *,
        lasting: bool = False,
    ) -> int:
        """Accept replicas of a start's runs, and return the port. runs: common prefix of their ids.

        address: this host's address to listen at; no other one is bound. port: port to listen at if it is free, or 0.
        tls: TLS settings, with which peers have to show certificates; None: links without TLS.
        rate: most bytes per second to send to each host that fetches; None: no limit. lasting: a later start has this
        secret, too, so that it may come for memory.

        Raises Unavailable if that address cannot be bound.
        """
        with self._lock:
            if self._closing:
                raise Contention("the daemon is ending", hint="retry", kind="daemon-ending")
            files = None if tls is None else tls.files
            # An earlier start of the same runs is over: its daemons are no longer admitted.
            self._starts = {**self._starts, runs: _Start(start, secret, files, rate, lasting)}
            for (bound, at), known in self._listeners.items():
                if bound == address and known.files == files:
                    known.tls = tls  # certificates may have been renewed
                    return at
            listener = _Listener(_listen(address, port), tls)
            at = int(listener.socket.getsockname()[1])
            self._listeners[address, at] = listener
            if len(self._listeners) == 1:
                sweep(self._folder)
        threading.Thread(target=self._accept, args=(listener,), name="scarctl-replicas", daemon=True).start()
        log.info("keeps replicas of %s: listens at %s port %d", runs, address, at)
        return at

    @property
    def busy(self) -> bool:
        """Whether a peer sends to a replica of this host, or fetches an arena from it."""
        with self._lock:
            return bool(self._writing) or self._lender.busy

    def wanted(self) -> bool:
        """Return whether a later start may come for memory here, which the store lacks, and has the secret for it.

        A secret that was drawn for one start is known to no later one.
        """
        with self._lock:
            lasting = tuple(runs for runs, start in self._starts.items() if start.lasting)
        try:
            return bool(lasting) and has_unsaved(self._folder, lasting)
        except (ScarError, OSError) as error:
            log.warning("this host's memory is no longer kept for other hosts: %s", error)
            return False

    def status(self) -> list[dict[str, Any]]:
        """Return the replicas being written: run, owner's host, and step."""
        with self._lock:
            replicas = [(run, replica) for run, (_, _, replica) in sorted(self._writing.items()) if replica]
        return [
            {
                "id": run,
                "host": replica.owner.host,
                "head_step": replica.arena.head_step,
                "complete": replica.complete,
            }
            for run, replica in replicas
        ]

    def hurry(self) -> None:
        """Give hosts that fetch some seconds: the daemon is about to end."""
        self._lender.hurry()

    def close(self) -> None:
        """End all connections: those of hosts that fetch after some seconds. The replicas stay."""
        with self._lock:
            self._closing = True
            for listener in self._listeners.values():
                with contextlib.suppress(OSError):
                    listener.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
                listener.socket.close()
            writing = list(self._writing.values())
        for channel, _, _ in writing:
            channel.shut()
        self._lender.close()

    # -- threads ------------------------------------------------------------------------------------------------

    def _accept(self, listener: _Listener) -> None:
        be_polite()  # the threads that it starts, too
        while not self._closing:
            try:
                connection, _ = listener.socket.accept()
            except OSError as error:
                if self._closing:
                    return
                self._warn("a connection was refused: %s", error)
                time.sleep(0.1)
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(
                    target=self._converse,
                    args=(connection, listener.tls),
                    name="scarctl-replica",
                    daemon=True,
                ).start()
            except RuntimeError as error:  # out of threads
                self._strangers.release()
                connection.close()
                self._warn("a connection was refused: %s", error)

    def _converse(self, connection: socket.socket, tls: Tls | None) -> None:
        """Serve one sender until it disconnects. No bytes that it sends can end the daemon."""
        strange = True
        channel = None
        try:
            with contextlib.ExitStack() as closing:
                closing.enter_context(connection)
                binding = ""
                if tls is not None:
                    secured = tls.secure(connection, server=True, seconds=STRANGER_SECONDS)
                    connection = closing.enter_context(secured)
                    binding = tls.binding(secured, server=True)
                channel = Channel(connection)
                hello, start = self._meet(channel, None if tls is None else tls.files, binding)
                strange = False
                self._strangers.release()
                channel.trust(None)
                channel.within(REPLY_SECONDS)
                kind, head, body = channel.receive(most_body=MAX_BODY)
                if kind is not Kind.LAYOUT:
                    self._lender.serve(channel, hello.run, kind, start.rate)
                    return
                channel.within(None)
                self._write(channel, hello, head, body)
        except Gone:
            pass  # the usual end
        except ScarError as error:
            self._warn("a peer was refused: %s", error)
        except Exception:
            log.exception("a peer's connection failed unexpectedly")
        finally:
            if strange:
                self._strangers.release()

    def _meet(self, channel: Channel, files: tuple[str, ...] | None, binding: str) -> tuple[Hello, _Start]:
        """Return the greeting of a peer that has proved to be of the same start, and that start.

        Raises AccessDenied, Corruption.
        """
        head, _ = channel.expect(Kind.HELLO)
        hello = Hello.from_json(head)
        runs, start = self._start_of(hello)
        if hello.version != VERSION or start is None or start.files != files:
            # This is temporary: the ranks of this host have not reached their daemon yet.
            channel.refuse(unknown_start())
            raise Gone
        asked = challenge(start.secret, hello, binding)
        channel.send(encode(Kind.CHALLENGE, asked))
        head, _ = channel.expect(Kind.PROOF)
        verify(start.secret, hello, asked["nonce"], head, binding)
        if not hello.run.startswith(runs):
            raise AccessDenied(f"a peer of {runs} names a run of another store: {hello.run!r:.80}")
        return hello, start

    def _start_of(self, hello: Hello) -> tuple[str, _Start | None]:
        """Return the start that a greeting names, and the prefix of its runs: the one of the greeting's run, if any."""
        with self._lock:
            known = [(runs, start) for runs, start in self._starts.items() if start.name == hello.start]
        named = [one for one in known if hello.run.startswith(one[0])]
        return (named or known)[0] if known else ("", None)

    def _write(self, channel: Channel, hello: Hello, head: Mapping[str, Any], layout: Bytes) -> None:
        """Write one replica from the peer's frames: head and body of the first are given. Refusals are sent to it."""
        run = hello.run
        try:
            self._replace(channel, hello)
            replica = self._begin(hello, head, layout)
            with self._lock:
                self._writing[run] = channel, threading.current_thread(), replica
            most, partitions = most_body(replica.arena), replica.arena.layout.partitions
            have = [array.view(np.uint8) for array in replica.have()]
            channel.send(encode(Kind.ACK, {"complete": replica.complete}, *have))
            while True:
                while not readable(channel) and replica.map_more():
                    pass
                kind, head, body = channel.receive(most_body=most)
                if kind in (Kind.BATCH, Kind.FIELDS):
                    replica.apply(decode_batch(head, body, partitions), rows=kind is Kind.BATCH)
                elif kind is Kind.EXTRAS:
                    replica.keep(body.tobytes())
                elif kind is Kind.MARK:
                    replica.mark(decode_mark(head, body))
                elif kind is Kind.DONE:
                    replica.remove()
                    log.info("%s: its host no longer needs the replica", run)
                else:
                    raise Corruption(f"a peer sends {kind.name} to a replica")
                channel.send(encode(Kind.ACK, {}))
        except ScarError as error:
            channel.refuse(error)
            raise
        finally:
            with self._lock:
                if self._writing.get(run, (None,))[0] is channel:
                    del self._writing[run]

    def _replace(self, channel: Channel, hello: Hello) -> None:
        """End an earlier connection for the same run: its sender has lost it. Raises Contention if it does not end.

        Raises Fenced if a process of a later epoch sends: the replica of its run is not complete yet, perhaps.
        """
        run, until = hello.run, time.monotonic() + STRANGER_SECONDS
        while True:
            with self._lock:
                earlier = self._writing.get(run)
                if earlier is None:
                    self._writing[run] = channel, threading.current_thread(), None
                    return
            if earlier[2] is not None:
                require_epoch(earlier[2].arena, hello.epoch)
            earlier[0].shut()
            earlier[1].join(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                raise Contention(f"{run}: an earlier connection does not end", kind="replica-busy")

    def _begin(self, hello: Hello, head: Mapping[str, Any], layout: Bytes) -> Replica:
        # A store's members always have the same start: its processes have names of their own.
        process = hex_of(head, "process", 32) if "process" in head else hello.start
        owner = Owner(text_of(head, "host", 300), process, number_of(head, "base_epoch", 1, MAX_EPOCH))
        require_newest(self._folder / hello.run, hello.run, owner, hello.epoch)
        return Replica.begin(
            self._folder, hello.run, layout.tobytes(), owner, hello.epoch, text_of(head, "store", 4000)
        )

    def _warn(self, text: str, error: Exception) -> None:
        """Log a warning, at most one per minute, so that bad peers do not fill the log."""
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + _WARN_SECONDS
            log.warning(text, error)


def _listen(address: str, port: int) -> socket.socket:
    """Listen at `port` if it is free, otherwise at any port. Raises Unavailable."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for wanted in (port, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, wanted))
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            if wanted == 0:
                raise Unavailable(
                    f"the daemon cannot listen at {address}: {error.strerror}",
                    hint="it is peer_address, or the address that reaches the master (MASTER_ADDR) or other hosts",
                    kind="no-address",
                ) from error
    raise AssertionError
