"""Add a deadline to calls that cannot be cancelled: they run in a thread that can be abandoned.

A synchronous file system may wait in a socket for any time. Its calls run one after the other, because most such file
systems are not thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any


class Aside:
    """Runs calls in order, in a daemon thread that ends after the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._working = False
        self.left = False
        """Whether new calls are refused."""

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call. Cancelling the future does not stop a call that has begun: see `leave`."""
        future: Future[Any] = Future()
        with self._lock:
            if self.left:
                future.cancel()
                return future
            self._calls.append((future, call))
            if not self._working:
                threading.Thread(target=self._work, name="scarctl-aside", daemon=True).start()
                self._working = True
        return future

    def leave(self) -> None:
        """Refuse new calls, and cancel waiting ones: the current call may never return."""
        with self._lock:
            self.left = True
            calls, self._calls = self._calls, deque()
        for future, _ in calls:
            future.cancel()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._working = False
                    return
                future, call = self._calls.popleft()
            if not future.cancelled():
                _settle(future, call)
            del future, call  # otherwise they would live until the next call


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:
        _try(future.set_exception, error)
    else:
        _try(future.set_result, result)


def _try(settle: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller has stopped waiting
        settle(value)
