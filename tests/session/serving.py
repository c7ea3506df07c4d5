"""Provide a server that changes a table in blocks of `session.iteration()`, and processes that are ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scarctl
import scarctl.session.departure
from scarctl.config import grouped
from scarctl.session.resumed import Resumed
from tests.support.waiting import wait_until

ROWS = 16
LONG = 600.0


class Server:
    """A server of a table that answers in blocks."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.table = np.zeros((ROWS, 4))
        self.count = {"requests": 0}
        settings: dict[str, Any] = {"interval": 1000, "rows": {"table": 1}, "extras": {"count": self.count}}
        self.session = scarctl.attach({"table": self.table}, store=store, **grouped(**settings | options))

    def half(self) -> None:
        self.table[: ROWS // 2] += 1

    def change(self, pause: Callable[[], object] = lambda: None) -> None:
        self.half()
        pause()
        self.table[ROWS // 2 :] += 1
        self.count["requests"] += 1

    def serve(self, requests: int = 1, pause: Callable[[], object] = lambda: None) -> None:
        for _ in range(requests):
            with self.session.iteration():
                self.change(pause)

    def flush_waits(self) -> None:
        """Return once a flush waits for the end of the block."""
        wait_until(lambda: self.session._gate._wanted)


def resumed(store: Path, mode: Any = "partial") -> tuple[Resumed, list[float], int]:
    """Return how a new process would continue: the result, the values of the table, and the count in extras."""
    server = Server(store)
    found = server.session.resume(mode)
    values = sorted(set(server.table.ravel().tolist()))
    server.session.close(seal=False)
    return found, values, server.count["requests"]


def never_waits() -> None:
    """Make a flush that waits outlast the test: it has to find out at once that no step is running."""
    scarctl.session.departure.FLUSH_SECONDS = LONG


def waits() -> None:
    threading.Event().wait()


def fails(server: Server, pause: Callable[[], object] = lambda: None) -> None:
    """Serve a request that raises KeyError after a half of its changes."""

    def raises() -> None:
        pause()
        raise KeyError("bad request")

    with server.session.iteration():
        server.change(raises)


def raises(server: Server, pause: Callable[[], object] = lambda: None) -> None:
    with pytest.raises(KeyError):
        fails(server, pause)
