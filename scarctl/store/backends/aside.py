"""Give calls that cannot be cancelled a deadline: they run in a thread that can be left alone.

A synchronous file system waits in a socket for as long as it likes. Its calls run one after the other, as most such
file systems are not for several threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any


class Aside:
    """Runs calls in order, in a daemon thread that ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._working = False
        self.left = False
        """Whether it takes no calls any more."""

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
        """Start no further call: the one under way may last for ever. Cancel those that wait."""
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
            del future, call  # nothing is kept alive until the next one comes


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:
        _try(future.set_exception, error)
    else:
        _try(future.set_result, result)


def _try(settle: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        settle(value)
