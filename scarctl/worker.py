"""One background thread that runs jobs in order: the copies beside the next forward and backward."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A call that runs on the worker: `wait` gives its result or raises what it raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call. Whatever it raises is kept for `wait`."""
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
        """Block until the call has ended, whatever came of it, at most `timeout` seconds; returns whether it has."""
        return self._done.wait(timeout)


class Worker:
    """A daemon thread, so that an interpreter that ends with a job under way is not held up by it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Queue a call."""
        job = Job(call)
        self._jobs.put(job)  # type: ignore[arg-type]
        return job

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
