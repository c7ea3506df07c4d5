"""Run an HTTP proxy on the loopback interface that treats requests as a network or a busy server does."""

from __future__ import annotations

import html
import http.client
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """The path without the query."""
    query: str
    headers: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class Fault:
    """A fault in place of passing a request on.

    answer: status and error code for the client, None: the connection is closed without an answer. done: the server
    carries out the request anyway. after: seconds before that.
    """

    answer: tuple[int, str] | None = None
    done: bool = False
    after: float = 0.0
    cut: bool = False
    """In place of all that: the true answer, with the connection closed after half of its body."""


Rule = Callable[[Request], Fault | None]

_HOPS = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


@dataclass
class Proxy:
    """Passes requests on to `target`, except those to which `rule` gives a fault."""

    target: str
    rule: Rule = lambda request: None
    drop_headers: tuple[str, ...] = ()
    """Headers (lower case) that never reach the server."""
    seen: list[Request] = field(default_factory=list)
    url: str = ""

    def reset(self) -> None:
        """Remove all faults, and forget all requests."""
        self.rule = lambda request: None
        self.drop_headers = ()
        self.seen.clear()

    def times(self, method: str, ending: str = "") -> int:
        """Return the number of requests of a method whose path ends with this text."""
        return sum(request.method == method and request.path.endswith(ending) for request in self.seen)


@contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    """Yield a running proxy in front of the server at `target`."""
    proxied = Proxy(target)

    class Handler(_Handler):
        owner = proxied

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    proxied.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxied
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = (
            self._chunks()
            if "chunked" in self.headers.get("Transfer-Encoding", "")
            else self.rfile.read(size)
        )
        parts = urllib.parse.urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, parts.path, parts.query, headers, len(body))
        self.owner.seen.append(request)
        fault = self.owner.rule(request)
        if fault is None:
            status, answered, data = self._pass_on(headers, body)
            self._answer(status, answered, data)
            return
        if fault.cut:
            status, answered, data = self._pass_on(headers, body)
            self._answer(status, {**answered, "X-Length": str(len(data))}, data[: len(data) // 2])
            self.close_connection = True
            return
        if fault.done:
            self._pass_on(headers, body)
        time.sleep(fault.after)
        if fault.answer is None:
            self.close_connection = True
            return
        status, code = fault.answer
        sent = " ".join(f"{name}: {value}" for name, value in headers.items())
        message = f"<Message>{html.escape(self.path + sent)}</Message>"
        data = f"<?xml version='1.0'?><Error><Code>{code}</Code>{message}</Error>".encode()
        self._answer(status, {"Content-Type": "application/xml"}, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _pass_on(self, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        host = urllib.parse.urlsplit(self.owner.target).netloc
        connection = http.client.HTTPConnection(host, timeout=30)
        left_out = _HOPS | set(self.owner.drop_headers)
        try:
            sent = {name: value for name, value in headers.items() if name not in left_out}
            connection.request(self.command, self.path, body=body or None, headers=sent)
            answer = connection.getresponse()
            data = answer.read()
            found = dict(answer.getheaders())
            if self.command == "HEAD":
                found["X-Length"] = found.get("Content-Length", found.get("content-length", "0"))
            return answer.status, found, data
        finally:
            connection.close()

    def _answer(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in (*_HOPS, "server", "date", "x-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", headers.get("X-Length", str(len(data))))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
