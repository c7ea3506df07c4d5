"""Connect to another host's daemon, and prove to each other that both serve the same start of the job."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from scarctl.peers.channel import REPLY_SECONDS, STRANGER_SECONDS, Channel
from scarctl.peers.frames import Kind, encode
from scarctl.peers.handshake import Hello, answer
from scarctl.peers.tls import Tls


@contextlib.contextmanager
def connected(
    address: str,
    port: int,
    hello: Hello,
    secret: bytes,
    tls: Tls | None,
    *,
    rate: float | None = None,
    seconds: float | None = None,
) -> Iterator[Channel]:
    """Yield a channel to the daemon at this address, once both sides have proved that they have the secret.

    rate: most bytes per second to send. seconds: time for that and for the first answer, until `Channel.within`; None:
    `STRANGER_SECONDS` for each part, then `REPLY_SECONDS` for each piece.

    Raises OSError if it cannot be reached, Gone, Corruption; AccessDenied without its proof, the error of a refusal.
    """
    until = None if seconds is None else time.monotonic() + seconds

    def left() -> float:
        return STRANGER_SECONDS if until is None else max(0.001, until - time.monotonic())

    with contextlib.ExitStack() as closing:
        connection = closing.enter_context(socket.create_connection((address, port), left()))
        binding = ""
        if tls is not None:
            secured = closing.enter_context(tls.secure(connection, server=False, seconds=left()))
            connection, binding = secured, tls.binding(secured, server=False)
        channel = Channel(connection, seconds=left())
        if rate is not None:
            channel.limit_rate(rate)
        channel.send(encode(Kind.HELLO, hello.to_json()))
        head, _ = channel.expect(Kind.CHALLENGE)
        channel.send(encode(Kind.PROOF, answer(secret, hello, head, binding)))
        channel.trust(REPLY_SECONDS)
        if until is not None:
            channel.within(left())
        yield channel
