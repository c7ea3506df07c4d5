"""Run several requests concurrently: the only place where a store makes threads.

Code that reads many things says so (`Blobs.each`) and stays ordinary; a remote store then has some of them under
way at a time, a local one two if they are large.
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
"""Pieces of work under way at a time, the caller's own included."""
AHEAD = 2 * AT_ONCE
"""Results that wait for a caller that takes them in order."""
AHEAD_BYTES = 64 << 20
"""Bytes that they may have together, unless it is one alone."""


def no_bytes(_: Any) -> int:
    """Return the size of work whose result is small."""
    return 0


class Helpers:
    """A bounded number of threads that take part in whatever is to be done.

    The caller works, too, so work may itself be made of such work: when all helpers are busy the caller does it alone.
    """

    def __init__(self, count: int = AT_ONCE - 1, *, patient: bool = False) -> None:
        """patient: when results are not wanted any more, wait until the work under way has ended. It may write."""
        self._patient = patient
        # A forked child may find some of them taken for ever. It is slower then, and waits for nobody.
        self._free = threading.Semaphore(count)

    def each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        """See `Blobs.each`. What is under way when a result is not wanted any more ends by its own deadline.

        Unless this is patient: then it has ended when this generator has.
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
            # In a child that was forked meanwhile nobody does it.
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
    """Take out all work that nobody has begun: by now no other thread can begin it."""
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
