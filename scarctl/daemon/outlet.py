"""Publish the daemon's metrics: in a file for node_exporter's textfile collector, and over HTTP on request.

Neither can stop the daemon from saving: a fault is logged, shown by `scarctl daemon status`, and retried.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from scarctl.daemon.metrics import CONTENT_TYPE, OPENMETRICS, OPENMETRICS_TYPE, exposition
from scarctl.daemon.status import DaemonStatus, MetricsStatus
from scarctl.errors import UsageError

log = logging.getLogger("scarctl")

FILE_VARIABLE = "SCARCTL_METRICS"
LISTEN_VARIABLE = "SCARCTL_METRICS_LISTEN"
"""A daemon gets these from the process that starts it: a session, or `scarctl daemon start`."""
LOOPBACK = "127.0.0.1"
WRITE_SECONDS = 15.0
"""Time between two writes of the file, and between two attempts to listen."""
_FRESH_SECONDS = 1.0
"""Seconds within which requests get the same figures, so that many requests cost little."""
_DEADLINE = 2.0
"""Seconds that one HTTP request may take. Requests are answered one after the other."""
_MOST = 16 << 10
"""Most bytes of a request."""


class Outlet:
    """Publishes the figures of `status`, a function, until `end`. Without a file and an address it does nothing."""

    def __init__(self, status: Callable[[], DaemonStatus], environ: Mapping[str, str]) -> None:
        """environ: `FILE_VARIABLE` has the file's absolute path, `LISTEN_VARIABLE` is as for `parse_listen`."""
        self._status = status
        self._file = environ.get(FILE_VARIABLE, "")
        self._listen = environ.get(LISTEN_VARIABLE, "")
        self._faults: dict[str, str] = {}
        """The newest fault of file and address."""
        self._ready: set[str] = set()
        self._listening: socket.socket | None = None
        self._seen: tuple[float, DaemonStatus] | None = None
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        """Begin to publish, in threads."""
        if self._file:
            self._writer = threading.Thread(target=self._write, name="scarctl-metrics", daemon=True)
            self._writer.start()
        if self._listen:
            threading.Thread(target=self._serve, name="scarctl-http", daemon=True).start()

    def end(self) -> None:
        """Stop, and remove the file: figures that are no longer updated must not look current."""
        self._ending.set()
        if self._listening is not None:
            self._listening.close()
        if self._writer is not None:
            self._writer.join(_DEADLINE)
            with contextlib.suppress(OSError):
                if "file" in self._ready:
                    os.unlink(self._file)

    def describe(self) -> MetricsStatus:
        """Return where the figures are published."""
        address = self._listen or None
        if self._listening is not None:
            with contextlib.suppress(OSError):
                address = _shown(self._listening)
        wanted = {name for name, given in (("file", self._file), ("listen", self._listen)) if given}
        return {
            "file": self._file or None,
            "listen": address,
            "ready": self._ready >= wanted,
            "fault": "; ".join(self._faults.values()) or None,
        }

    def _figures(self, openmetrics: bool = False) -> bytes:
        with self._lock:
            now = time.monotonic()
            if self._seen is None or now > self._seen[0] + _FRESH_SECONDS:
                self._seen = now, self._status()
            return exposition(self._seen[1], openmetrics=openmetrics)

    def _trouble(self, kind: str, fault: str) -> None:
        if self._faults.get(kind) != fault:
            log.warning("metrics are not published: %s", fault)
        self._faults[kind] = fault

    def _works(self, kind: str) -> None:
        self._faults.pop(kind, None)
        self._ready.add(kind)

    def _write(self) -> None:
        while not self._ending.is_set():
            try:
                write_file(self._file, self._figures())
                self._works("file")
            except (OSError, UsageError) as error:
                self._trouble("file", f"{self._file}: {error}")
            except Exception:
                log.exception("metrics could not be written")
            self._ending.wait(WRITE_SECONDS)

    def _serve(self) -> None:
        while not self._ending.is_set():
            try:
                listening = listen(self._listen)
            except (OSError, UsageError) as error:
                self._trouble("listen", f"{self._listen}: {error}")
                self._ending.wait(WRITE_SECONDS)
                continue
            self._listening = listening
            self._works("listen")
            if not ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
                log.warning("metrics on %s can be read by every host that reaches it", _shown(listening))
            self._accept(listening)

    def _accept(self, listening: socket.socket) -> None:
        while not self._ending.is_set():
            try:
                connection, _ = listening.accept()
            except OSError as error:  # closed by `end`, or out of descriptors
                if not self._ending.is_set():
                    self._trouble("listen", f"{self._listen}: {error}")
                self._ending.wait(_FRESH_SECONDS)
                continue
            try:
                with connection:
                    answer(connection, self._figures)
            except OSError:
                pass  # the peer has gone, or is too slow
            except Exception:
                log.exception("a request for metrics failed")


def write_file(path: str, text: bytes) -> None:
    """Replace the file atomically: readers see the old text or the new one. Raises UsageError for a relative path,
    OSError.

    The folder must exist. Everyone may read the file.
    """
    if not os.path.isabs(path):
        raise UsageError("the metrics' file needs an absolute path, because a daemon has no current folder")
    folder, name = os.path.split(path)
    # The textfile collector reads *.prom only.
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # left by an earlier process with this id
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of "9464" (on the loopback interface), "host:9464" or "[::1]:9464". Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(
            f"metrics cannot be served on {text!r}", hint="give a port, such as 9464, or HOST:PORT"
        )
    return host.strip("[]") or LOOPBACK, int(port)


def listen(text: str) -> socket.socket:
    """Return a socket that accepts connections at an address. Raises UsageError, OSError."""
    host, port = parse_listen(text)
    ((family, _, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(address[:2], family=family)


def answer(connection: socket.socket, figures: Callable[[bool], bytes]) -> None:
    """Answer one HTTP request, and close. Raises OSError if the peer is slow or gone.

    figures: returns the text; as OpenMetrics if its argument is true, for a request that accepts it.
    """
    deadline = time.monotonic() + _DEADLINE
    request = b""
    while b"\r\n\r\n" not in request:
        left = deadline - time.monotonic()
        if left <= 0 or len(request) > _MOST:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(4096)
        if not part:
            return
        request += part
    words = request.split(b"\r\n", 1)[0].split(b" ")
    status, body = "400 Bad Request", b"this is no HTTP request\n"
    openmetrics = _accepts(request, OPENMETRICS)
    if len(words) == 3 and words[2].startswith(b"HTTP/1."):
        if words[0] not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b"only GET\n"
        elif words[1].partition(b"?")[0] != b"/metrics":
            status, body = "404 Not Found", b"look at /metrics\n"
        else:
            status, body = "200 OK", figures(openmetrics)
    kind = "text/plain; charset=utf-8"
    if status.startswith("200"):
        kind = OPENMETRICS_TYPE if openmetrics else CONTENT_TYPE
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    connection.settimeout(_DEADLINE)
    connection.sendall(head.encode() + (b"" if words[0] == b"HEAD" else body))


def _accepts(request: bytes, kind: str) -> bool:
    """Return whether a request's header Accept names a media type without refusing it."""
    head = request.decode("latin-1").lower().split("\r\n\r\n")[0].split("\r\n")[1:]
    found = [value for name, _, value in (line.partition(":") for line in head) if name == "accept"]
    for one in ",".join(found).split(","):
        name, *parameters = (part.strip() for part in one.split(";"))
        if name == kind:
            return not any(part in ("q=0", "q=0.0", "q=0.00", "q=0.000") for part in parameters)
    return False


def _shown(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
