"""Encrypt links, and have both ends verify each other's certificate: mutual TLS, as an option.

Certificates are checked against one authority, which signs only the hosts of a job or a cluster. Names in certificates
do not count: hosts are reached by their addresses. The proofs that follow (`peers.handshake`) cover both certificates,
so a host with a certificate cannot stand between two others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import time
from collections.abc import Sequence

from scarctl.errors import AccessDenied, ScarError, UsageError

_FAREWELL = 1.0
"""Seconds to wait until a refused peer has read the reason."""
_MOST_LEFT = 64 << 10


class Tls:
    """This host's certificate and key, and the authority of all hosts."""

    def __init__(self, files: Sequence[str]) -> None:
        """Read three PEM files: certificate, key, authority. Raises UsageError if they do not work together."""
        self.files = tuple(files)
        certificate, key, authority = self.files
        for path in self.files:
            _require_readable(path)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authority)
        self._server.num_tickets = 0  # a link resumes with a new proof
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authority)
        self._own = _try_alone(self._server, self._client, certificate)

    def secure(self, connection: socket.socket, *, server: bool, seconds: float) -> ssl.SSLSocket:
        """Return the connection, encrypted, once each end has verified the other. It replaces `connection`.

        Raises AccessDenied (kind "peer-tls") if one end refuses the other, or does not answer within `seconds`.
        """
        connection.settimeout(seconds)
        context = self._server if server else self._client
        wrapped = context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)
        try:
            wrapped.do_handshake()
        except OSError as error:
            if server:
                _let_read(wrapped)
            wrapped.close()
            raise refusal(error) from error
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def binding(self, connection: ssl.SSLSocket, *, server: bool) -> str:
        """Return the identity of both ends: digests of the sender's certificate and of the receiver's."""
        other = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
        return other + self._own if server else self._own + other


def refusal(error: OSError) -> ScarError:
    """Describe why two ends do not communicate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"its certificate is not accepted: {error.verify_message}"
        return AccessDenied(text, hint="peer_tls of both hosts needs the same authority", kind="peer-tls")
    reason = (getattr(error, "reason", None) or "").upper()
    if "_ALERT_" in reason and reason.rpartition("_ALERT_")[2] not in ("INTERNAL_ERROR", "PROTOCOL_VERSION"):
        why = reason.rpartition("_ALERT_")[2].replace("_", " ").lower()
        text = f"it does not accept this host's certificate: {why}"
        return AccessDenied(text, hint="peer_tls of both hosts needs the same authority", kind="peer-tls")
    if isinstance(error, TimeoutError):
        return AccessDenied("it does not finish a TLS handshake in time", kind="peer-tls")
    return AccessDenied(
        f"TLS with it failed: {error.strerror or error}",
        hint="give peer_tls on all hosts, or on none",
        kind="peer-tls",
    )


def _context(protocol: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(authority)
    except (ssl.SSLError, OSError) as error:
        raise _bad(authority, "it has no certificate of an authority in PEM form") from error
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        why = "KEY_VALUES_MISMATCH" in str(error)
        text = (
            f"it is not the key of {certificate}"
            if why
            else f"it and {certificate} are not a key and a certificate"
        )
        raise _bad(key, text) from error
    return context


def _no_password() -> str:
    """Refuse to ask for a password: a daemon has no terminal."""
    raise UsageError(
        "peer_tls: the key has a password",
        hint="give a key without one, which only you can read",
        kind="peer-tls",
    )


def _require_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from error


def _bad(path: str, why: str) -> UsageError:
    return UsageError(
        f"peer_tls: {os.fspath(path)}: {why}",
        hint="give certificate, key and authority, in PEM form",
        kind="peer-tls",
    )


def _try_alone(server: ssl.SSLContext, client: ssl.SSLContext, certificate: str) -> str:
    """Return the digest of this host's certificate, once it has verified itself: in memory, before any other host does.

    Raises UsageError for one that has expired, or that the authority has not signed.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    left = list(ends)
    for _ in range(8):
        for end in tuple(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
                raise _bad(certificate, f"other hosts would not accept it: {why}") from error
    if left:
        raise _bad(certificate, "a TLS handshake with it does not end")
    return hashlib.sha256(ends[0].getpeercert(binary_form=True) or b"").hexdigest()


def _let_read(connection: socket.socket) -> None:
    """Let a refused peer read the alert: closing at once would reset the connection, and drop it."""
    until, left = time.monotonic() + _FAREWELL, _MOST_LEFT
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while left > 0 and (seconds := until - time.monotonic()) > 0:
            connection.settimeout(seconds)
            data = socket.socket.recv(connection, 4096)
            if not data:
                return
            left -= len(data)
