"""Run jobs in order in one background thread: the copies made during the next forward and backward pass.

Or run a call for many items in several threads at once.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def run_all(call: Callable[[T], object], items: Iterable[T], threads: int) -> None:
    """Call `call` with every item, in up to `threads` threads, the caller's own included; return when all have ended.

    Raises the exception of a call that failed. Then some items may not have been processed.
    """
    todo = deque(items)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                item = todo.popleft()
            except IndexError:
                return
            try:
                call(item)
            except BaseException as error:
                errors.append(error)

    helpers: list[threading.Thread] = []
    try:
        for _ in range(min(threads, len(todo)) - 1):
            helper = threading.Thread(target=work, name="scarctl-helper", daemon=True)
            helper.start()
            helpers.append(helper)
        work()
    finally:
        todo.clear()
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[0]


class Job(Generic[T]):
    """A call that runs on the worker. `wait` returns its result or raises its exception."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call, and keep its exception for `wait`."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> T:
        """Block until the call has ended, then return its result or raise its exception."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def settle(self, timeout: float | None = None) -> bool:
        """Block until the call has returned or raised, at most `timeout` seconds; return whether it has."""
        return self._done.wait(timeout)


class Worker:
    """A thread that runs queued jobs. An interpreter that ends does not wait for it: it is a daemon thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Queue a call, and return its job."""
        job = Job(call)
        self._jobs.put(job)  # type: ignore[arg-type]
        return job

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
