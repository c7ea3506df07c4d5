"""Run a server of a shard as a process, with datagrams between processes of one host: roles, clock and network.

python -m examples.parameter_server.node FOLDER NAME
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

from examples.parameter_server.control import FolderControl
from examples.parameter_server.roles import Action, Push, Record, Sent, Server

CONTACT, PATIENCE = 0.4, 0.3
"""Seconds from one contact with the control plane to the next, and until a worker repeats a push."""
_LARGEST = 1 << 20
log = logging.getLogger(__name__)


class Network:
    """One process's socket."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        (folder / name).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        self._socket.bind(str(folder / name))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self, message: Sent) -> None:
        """Send it, unless the other one is gone or does not read: messages may be lost."""
        data = [message.to, message.what, message.epoch, _plain(message.body), message.sender]
        # A socket with a timeout waits for room even with MSG_DONTWAIT, and then raises TimeoutError.
        with contextlib.suppress(FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError):
            self._socket.sendto(
                json.dumps(data).encode(), socket.MSG_DONTWAIT, str(self._folder / message.to)
            )

    def receive(self, seconds: float) -> Sent | None:
        """Return the next message; None if none comes in that time."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            to, what, epoch, body, sender = json.loads(self._socket.recv(_LARGEST))
        except TimeoutError:
            return None
        return Sent(to, what, epoch, _pushed(body), sender)


def _plain(body: Any) -> Any:
    if isinstance(body, Push):
        return {"push": [body.worker, body.number, body.value]}
    return [_plain(part) for part in body] if isinstance(body, list | tuple) else body


def _pushed(body: Any) -> Any:
    if isinstance(body, dict):
        return Push(*body["push"])
    return [_pushed(part) for part in body] if isinstance(body, list) else body


def serve(folder: Path, name: str) -> None:
    """Run a server until it is killed."""
    control, network, server = FolderControl(folder / "control", name), Network(folder, name), Server(name)
    contact = 0.0

    def do(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Sent):
                network.send(action)
            else:
                control.swap(action.record)

    while True:
        try:
            if time.monotonic() >= contact:
                began = time.monotonic()
                contact = began + CONTACT
                control.beat()
                # What it did not reach since then does not count as reached.
                do(server.reached(control.read(), began, control.alive()))
            message = network.receive(contact - time.monotonic())
            if message is not None:
                do(server.received(message, time.monotonic()))
        except OSError as error:
            log.warning("the control plane is away: %s", error)


class Worker:
    """Pushes one value after the other, each until it is acknowledged."""

    def __init__(self, folder: Path, name: str) -> None:
        self._control, self._network = FolderControl(folder / "control"), Network(folder, name)
        self.name, self.number = name, 0
        self.refused = 0
        self._record = Record(-1, (), frozenset())

    def push(self, value: float, timeout: float = 60.0) -> float:
        """Return the seconds until the last of the chain has acknowledged it. Raises TimeoutError."""
        began = time.monotonic()
        while time.monotonic() < began + timeout:
            with contextlib.suppress(OSError, ValueError):
                self._record = self._control.read()
            push, record = Push(self.name, self.number, value), self._record
            if record.chain:
                self._network.send(Sent(record.chain[0], "push", record.epoch, push, self.name))
            until = time.monotonic() + PATIENCE
            while (left := until - time.monotonic()) > 0:
                answer = self._network.receive(left)
                if answer is None:
                    break
                if answer.what == "refused":
                    self.refused += 1
                elif answer.epoch >= record.epoch and answer.body.number == self.number:
                    self.number += 1
                    return time.monotonic() - began
        raise TimeoutError(f"push {self.number} is not acknowledged after {timeout:g} s: {self._record}")

    def close(self) -> None:
        """Close the worker's socket."""
        self._network.close()

    def log_of(self, server: str, timeout: float = 10.0) -> list[tuple[str, int]]:
        """Return the pushes in a server's log, if it is the last of the chain."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            record = self._control.read()
            self._network.send(Sent(server, "copy", record.epoch, None, self.name))
            answer = self._network.receive(PATIENCE)
            if answer is not None and answer.what == "copied":
                return [(push.worker, push.number) for push in answer.body]
        raise TimeoutError(f"{server} does not answer")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
