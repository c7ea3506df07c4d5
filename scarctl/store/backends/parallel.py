"""Run several requests concurrently: the only place where a store starts threads.

Code that reads many files passes them to `Blobs.each`. A remote store then reads some of them concurrently, a local
store two of them if they are large.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from scarctl.util.worker import Job

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
"""Most concurrent pieces of work, the caller's own included."""
AHEAD = 2 * AT_ONCE
"""Most results that wait for the caller, which takes them in order."""
AHEAD_BYTES = 64 << 20
"""Most bytes of waiting results, unless it is a single one."""


def no_bytes(_: Any) -> int:
    """Return the size of work whose result is small."""
    return 0


class Helpers:
    """A bounded number of threads that help callers with their work.

    The caller works, too, so work may be nested: if all helpers are busy, the caller does it alone.
    """

    def __init__(self, count: int = AT_ONCE - 1, *, patient: bool = False) -> None:
        """patient: if the caller stops early, wait until current work has ended, because it may still write."""
        self._patient = patient
        # In a forked child some helpers may be taken forever. This costs speed, but never blocks.
        self._free = threading.Semaphore(count)

    def each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """See `Blobs.each`. If the caller stops early, current work ends by its own deadline.

        With `patient`, it has ended when this generator has.
        """
        left, process = iter(items), os.getpid()
        ahead: deque[tuple[int, Job[R]]] = deque()
        todo: deque[Job[R]] = deque()
        waiting = 0  # bytes
        following = next(left, None)
        try:
            while ahead or following is not None:
                while following is not None and len(ahead) < AHEAD:
                    nbytes = size(following)
                    if ahead and waiting + nbytes > AHEAD_BYTES:
                        break
                    job = Job(partial(work, following))
                    ahead.append((nbytes, job))
                    todo.append(job)
                    waiting += nbytes
                    following = next(left, None)
                    if ahead[0][1] is not job:
                        self._hire(todo)
                nbytes, job = ahead.popleft()
                while not job.settle(0) and _help(todo):
                    pass
                waiting -= nbytes
                yield job.wait()
        finally:
            left_out = set(_take_all(todo))
            # A child that was forked meanwhile has no helpers that could end it.
            for _, job in ahead if self._patient and os.getpid() == process else ():
                if job not in left_out:
                    job.settle()

    def _hire(self, todo: deque[Job[R]]) -> None:
        if self._free.acquire(blocking=False):
            threading.Thread(target=self._work, args=(todo,), name="scarctl-helper", daemon=True).start()

    def _work(self, todo: deque[Job[R]]) -> None:
        try:
            while _help(todo):
                pass
        finally:
            self._free.release()


def _take_all(todo: deque[Job[R]]) -> Iterator[Job[R]]:
    """Take out all work that no thread has begun. No thread begins it later."""
    with contextlib.suppress(IndexError):
        while True:
            yield todo.popleft()


def _help(todo: deque[Job[R]]) -> bool:
    """Do one piece of work, if there is any."""
    try:
        job = todo.popleft()
    except IndexError:
        return False
    job.run()
    return True
