"""Count calls, and act at one of them: kill a process there, or let the call fail."""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

CALLS = ("write", "fsync", "link", "unlink", "replace", "mkdir")
"""The system calls of the commit path. The state before one of them is the result of the call before it."""


class Fault:
    """Counts calls of `owner` and does something right before or after the k-th."""

    def __init__(
        self,
        k: int,
        action: Callable[[], Any],
        names: tuple[str, ...] = CALLS,
        *,
        owner: Any = os,
        after: bool = False,
        counts: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """counts: asked with the name of a call and its arguments."""
        self.k, self.action, self.names = k, action, names
        self.owner, self.after, self.counts = owner, after, counts
        self.count = 0
        self._lock = threading.Lock()
        self.originals = {name: getattr(owner, name) for name in names}

    def __enter__(self) -> Fault:
        for name in self.names:
            setattr(self.owner, name, self._wrap(name, self.originals[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(self.owner, name, original)

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.counts(name, *args):
                return original(*args, **kwargs)
            with self._lock:
                self.count += 1
                here = self.count == self.k
            if here and not self.after:
                self.action()
            try:
                return original(*args, **kwargs)
            finally:
                if here and self.after:
                    self.action()

        return call


class Killed(BaseException):
    """Stands in for a kill where there is no process to be killed. No code may catch it."""


class Mortal(Fault):
    """Simulates a process's death within this one: from the k-th call on, every call raises Killed and does nothing."""

    def __init__(self, k: int, names: tuple[str, ...], *, owner: Any = os, after: bool = False) -> None:
        super().__init__(k, self._die, names, owner=owner, after=after)
        self.dead = False

    def _die(self) -> None:
        self.dead = True
        raise Killed

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        counted = super()._wrap(name, original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Killed
            return counted(*args, **kwargs)

        return call


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; return its wait status."""
    gc.freeze()  # the child shares this process's memory, so its collector should not touch it
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
