"""Run a TCP relay on the loopback interface, which passes as many bytes as a test allows."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Relay:
    """Passes connections on to `target`, a port. Data of clients wait while the `allow`ed bytes are used up."""

    def __init__(self) -> None:
        self.target = 0
        self.stuck = False
        """Whether bytes wait that may not pass."""
        self.seen = bytearray()
        """All bytes that have passed, in both directions."""
        self._left = 1 << 40
        self._refusing = self._closed = False
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allow(self, nbytes: int) -> None:
        """Let so many more bytes reach the target, whatever was allowed before."""
        with self._lock:
            self._left = nbytes

    def refuse(self) -> None:
        """End all connections, and each new connection at once."""
        self._refusing = True
        self._end_all()

    def accept(self) -> None:
        """Pass new connections on again."""
        self._refusing = False

    def close(self) -> None:
        """End everything."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()

    def _end_all(self) -> None:
        with self._lock:
            sockets, self._open = self._open, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, counted: bool) -> None:
        try:
            while data := one.recv(1 << 16):
                while data:
                    with self._lock:
                        count = min(len(data), self._left) if counted else len(data)
                        self._left -= count if counted else 0
                        self.stuck = counted and not count
                        self.seen += data[:count]
                    other.sendall(data[:count])
                    data = data[count:]
                    if data:
                        time.sleep(0.01)
        except OSError:
            pass
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
