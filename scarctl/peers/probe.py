"""Test whether a daemon keeps replicas at an address: to a stranger it answers with a refusal."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from dataclasses import dataclass

from scarctl.errors import Corruption, ScarError, Unavailable, UsageError
from scarctl.peers.channel import Channel, Gone
from scarctl.peers.frames import Kind, encode
from scarctl.peers.handshake import Hello
from scarctl.peers.tls import Tls
from scarctl.util.document import Document

ROUNDS = 5
SECONDS = 5.0
"""Longest time of one connection."""


@dataclass(frozen=True, slots=True)
class PeerDiagnosis(Document):
    """A daemon that listens for peers, as a stranger sees it."""

    address: str
    port: int
    source: str
    """Address of this host from which it was reached."""
    connect_seconds: float
    """Shortest time of a connection."""
    answer_seconds: float
    """Shortest time from a greeting to its refusal."""


def parse_peer(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; an IPv6 address may be in brackets. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UsageError(
            f"{text!r:.80} is not HOST:PORT", hint='the daemon\'s log has both, after "listens at"'
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def probe(host: str, port: int, tls: Tls | None = None, *, rounds: int = ROUNDS) -> PeerDiagnosis:
    """Connect to a daemon several times, to be refused. Needs no secret, and leaves nothing behind.

    tls: certificate to show to a daemon that uses TLS.

    Raises Unavailable if nothing answers there in time, or (kind "peer-tls") if a certificate is necessary;
    AccessDenied (kind "peer-tls") if one end refuses the other's; Corruption if no daemon for replicas answers.
    """
    found = [_once(host, port, tls) for _ in range(rounds)]
    source, _, _ = found[0]
    return PeerDiagnosis(host, port, source, min(one[1] for one in found), min(one[2] for one in found))


def _once(host: str, port: int, tls: Tls | None) -> tuple[str, float, float]:
    began = time.monotonic()
    connection = _connect(host, port)
    connected = time.monotonic()
    try:
        source = str(connection.getsockname()[0])
        connection.settimeout(SECONDS)
        if tls is not None:
            connection = tls.secure(connection, server=False, seconds=SECONDS)
        channel = Channel(connection, seconds=SECONDS)
        # The daemon does not know this start: its answer is a refusal.
        hello = Hello.new(secrets.token_hex(16), "doctor", 1)
        channel.send(encode(Kind.HELLO, hello.to_json()))
        channel.expect(Kind.CHALLENGE)
    except Gone as error:
        if tls is None and _asks_for_certificate(host, port):
            raise Unavailable(
                f"{host} port {port} answers with TLS, and asks for a certificate",
                hint="give --peer-tls CERT,KEY,CA",
                kind="peer-tls",
            ) from error
        raise _stranger(host, port) from error
    except Corruption as error:
        raise _stranger(host, port) from error
    except ScarError as error:
        if error.kind == "unknown-start":
            return source, connected - began, time.monotonic() - connected
        raise type(error)(f"{host} port {port}: {error.message}", hint=error.hint, kind=error.kind) from error
    finally:
        connection.close()
    raise _stranger(host, port)


def _connect(host: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((host, port), SECONDS)
    except OSError as error:
        raise Unavailable(
            f"{host} port {port} cannot be reached: {error.strerror or error}",
            hint="perhaps a firewall, another network, or the daemon has ended; its log shows where it listens",
            kind="peer-unreachable",
        ) from error


def _asks_for_certificate(host: str, port: int) -> bool:
    """Return whether a TLS server answers that refuses clients without a certificate, as a daemon with TLS does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with _connect(host, port) as plain:
        try:
            with context.wrap_socket(plain) as secured:
                secured.recv(1)  # with TLS 1.3 the refusal comes after this end's handshake
        except ssl.SSLError as error:
            return (error.reason or "").endswith(("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE"))
        except OSError:
            return False
    return False


def _stranger(host: str, port: int) -> Corruption:
    return Corruption(
        f"{host} port {port} is open, but no daemon of this version keeps replicas there",
        hint="the daemon's log shows where it listens",
        kind="no-peer",
    )
