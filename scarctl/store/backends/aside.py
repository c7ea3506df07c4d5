"""Add a deadline to calls that cannot be cancelled: they run in threads that can be abandoned.

A synchronous file system may wait in a socket for any time. Its calls run one after the other, because most such file
systems are not thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")


class Aside:
    """Runs calls one at a time, each in a daemon thread."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self.left = False
        """Whether no call begins any more."""

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call when those before it have ended. Cancelling its future does not stop it, once it has begun."""
        future: Future[T] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        threading.Thread(target=self._run, args=(future, call), name="scarctl-aside", daemon=True).start()
        return future

    def leave(self) -> None:
        """Cancel all calls, of which the current one may never return, and refuse new ones."""
        self.left = True
        for future in list(self._calls):
            future.cancel()

    def _run(self, future: Future[T], call: Callable[[], T]) -> None:
        with self._turn:
            if self.left:
                future.cancel()
            if future.cancelled():
                return
            with contextlib.suppress(InvalidStateError):  # the caller has stopped waiting
                try:
                    result = call()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
