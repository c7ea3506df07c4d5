"""Send and receive frames over a TCP connection. A stranger may send only small frames, in a short time."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from scarctl.errors import Corruption, ScarError, Unavailable, error_fields, error_from
from scarctl.peers.frames import (
    MAX_BODY,
    MAX_HEAD,
    MAX_STRANGER,
    PREFIX,
    Buffer,
    Kind,
    decode_head,
    decode_prefix,
    encode,
)
from scarctl.peers.tls import refusal
from scarctl.util.arrays import Bytes

STRANGER_SECONDS = 10.0
"""Seconds in which a peer has to prove its identity."""
REPLY_SECONDS = 120.0
"""Seconds for the answer to a frame: some batches over a slow network. A dead host is detected earlier."""
_SO_MAX_PACING_RATE = 47  # Linux
_MOST_RATE = (1 << 32) - 2


class Gone(Exception):
    """The other side has closed the connection, or it is broken."""


class Channel:
    """One connection. `trust` lifts the limits of strangers."""

    def __init__(self, connection: socket.socket, *, seconds: float | None = None) -> None:
        """Begin as strangers. seconds: time to prove identities; None: `STRANGER_SECONDS`."""
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline: float | None = time.monotonic() + (STRANGER_SECONDS if seconds is None else seconds)
        self._trusted = False
        self._patience: float | None = None
        self._staging: Bytes = np.empty(0, np.uint8)

    def trust(self, seconds: float | None) -> None:
        """Accept larger frames from now on. seconds: time to wait for each piece; None: forever, while the host
        answers.
        """
        self._trusted, self._deadline, self._patience = True, None, seconds
        # A dead host does not end the connection.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 30_000),
        ):
            if hasattr(socket, name):
                self._connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection.settimeout(seconds)

    def within(self, seconds: float | None) -> None:
        """Give the other side this time for all that follows, from now on. None: no limit, until a piece is late."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        if seconds is None:
            self._connection.settimeout(self._patience)

    def limit_rate(self, rate: float) -> None:
        """Send at most `rate` bytes per second. Raises Unavailable if this system cannot do so."""
        try:
            self._connection.setsockopt(
                socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(max(1, int(rate)), _MOST_RATE)
            )
        except OSError as error:
            raise Unavailable(
                f"this system does not limit the rate of a connection: {error.strerror}",
                hint="omit peer_bandwidth",
                kind="no-pacing",
            ) from error

    def send(self, frame: Sequence[Buffer]) -> None:
        """Send a frame. Raises Gone."""
        try:
            for part in frame:
                self._set_timeout()
                self._connection.sendall(part)
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error

    def receive(
        self, *, most_body: int = MAX_BODY, strictly: bool = False
    ) -> tuple[Kind, dict[str, Any], Bytes]:
        """Return the next frame: kind, head, and body, which is valid until the next call. Raises Gone, Corruption.

        most_body: bytes of the largest batch; strictly: of the largest body of any kind.
        """
        strange = not self._trusted
        data = np.empty(PREFIX.size, np.uint8)
        self._fill(data)
        prefix = decode_prefix(
            data.tobytes(),
            most_head=MAX_STRANGER if strange else MAX_HEAD,
            most_body=0 if strange else most_body if strictly else max(most_body, MAX_BODY),
        )
        text = np.empty(prefix.head, np.uint8)
        self._fill(text)
        if prefix.kind in (Kind.BATCH, Kind.FIELDS) and prefix.body > most_body:
            raise Corruption(f"a batch claims {prefix.body} bytes, more than {most_body}")
        body = self._staged(prefix.body)
        self._fill(body)
        return prefix.kind, decode_head(prefix, text.tobytes(), body), body

    def expect(
        self, kind: Kind, *, most_body: int = MAX_BODY, strictly: bool = False
    ) -> tuple[dict[str, Any], Bytes]:
        """Return head and body of the next frame, which must be of this kind. The limits are those of `receive`.

        Raises the error of a refusal; Corruption for another kind, Gone. A stranger's refusal is believed only if it
        does not know this start of the job (Unavailable, `kind` "unknown-start"). Otherwise it is Gone: anyone may say
        that a run has continued elsewhere.
        """
        found, head, body = self.receive(most_body=most_body, strictly=strictly)
        if found is Kind.REFUSED:
            error = error_from(head.get("error"))
            if self._trusted:
                raise error
            if error.kind == "unknown-start":
                raise unknown_start()
            raise Gone("it refuses, and has not proved its identity")
        if found is not kind:
            raise Corruption(f"a peer sends {found.name}, not {kind.name}")
        return head, body

    def refuse(self, error: ScarError) -> None:
        """Send the other side the reason for the end, if it still listens."""
        with contextlib.suppress(Gone):
            self.send(encode(Kind.REFUSED, {"error": error_fields(error)}))

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.fileno()

    @property
    def buffered(self) -> bool:
        """Whether bytes were received that `receive` has not returned yet."""
        return isinstance(self._connection, ssl.SSLSocket) and self._connection.pending() > 0

    def shut(self) -> None:
        """End the connection for both sides, also for a thread of this process that waits in `receive`."""
        with contextlib.suppress(OSError):
            # Below TLS, because its own method would end encryption for a thread that still sends.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def _staged(self, size: int) -> Bytes:
        if self._staging.size < size:
            self._staging = np.empty(size, np.uint8)
        return self._staging[:size]

    def _fill(self, data: Bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                self._set_timeout()
                count = self._connection.recv_into(left)
                if not count:
                    raise Gone("the connection has ended")
                left = left[count:]
        except ssl.SSLError as error:
            # A peer may refuse this host's certificate after this side has finished the handshake.
            raise refusal(error) from error
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error

    def _set_timeout(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                late = (
                    "it did not continue in time"
                    if self._trusted
                    else "a peer did not prove its identity in time"
                )
                raise Gone(late)
            self._connection.settimeout(left)


def unknown_start() -> Unavailable:
    """Return the refusal of a daemon that does not know a start of the job."""
    return Unavailable(
        "that host does not know this start of the job",
        hint="its processes begin later, have ended, or have other files for TLS or another version of scarctl",
        kind="unknown-start",
    )


def readable(channel: Channel) -> bool:
    """Return whether the other side has sent bytes, or is gone."""
    if channel.buffered:
        return True
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))
