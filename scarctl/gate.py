"""Keeps an optimizer's step and a flush from another thread apart.

A step that is running is never copied: a flush waits until it has ended. While a flush is under way the next step waits
at the gate; what comes before it, forward and backward, goes on. The flush waits for nothing else that the training
thread does, and for a step not for ever, so neither can hold up the other for good.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SETTLE = 0.25
"""Seconds after a step in which the loop may still be changing what belongs to it (a schedule), unless it is at the
next one already."""


class Gate:
    """One training thread goes in and out; other threads ask for `quiet`.

    stepping: whether a step counts as running from the start. Where no hook says that a step begins, it begins when the
    last one has ended.
    """

    def __init__(self, *, stepping: bool) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._stepping = stepping
        self._implied = stepping
        self._wanted = 0
        self._at_gate = self._over = False
        self._settled_at = -math.inf
        self._trainer = threading.get_ident()

    @property
    def stepping(self) -> bool:
        """Whether parameters may be half changed."""
        return self._stepping

    @property
    def trainer(self) -> int:
        """Number of the thread that trains."""
        return self._trainer

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nobody else is inside `held` or `quiet`. May be nested."""
        with self._changed, _outside_inference():
            yield

    def enter(self) -> None:
        """A step begins, now: the caller's thread is the training thread. Waits for a flush that is under way."""
        with self._changed:
            self._trainer = threading.get_ident()
            if self._stepping:
                return
            self._at_gate = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._wanted)
            finally:
                self._at_gate = False
            self._stepping = True

    def leave(self, settle: float = SETTLE) -> None:
        """The step has ended. settle: seconds after which the loop counts as done with it, if nothing says so."""
        with self._changed:
            self._stepping = False
            self._settled_at = time.monotonic() + settle
            self._changed.notify_all()

    def settled(self, wait: float = 0.0) -> None:
        """The loop is done with what belongs to the step. wait: seconds that a flush may still wait for more."""
        with self._changed:
            self._settled_at = min(self._settled_at, time.monotonic() + wait)
            self._changed.notify_all()

    def end(self) -> None:
        """There will be no more steps: whoever waits for one to end goes away without."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def quiet(self, timeout: float, *, between: bool | None = None) -> Iterator[bool]:
        """Wait up to `timeout` seconds until no step is running; inside, none begins. Yields whether that is so.

        between: where nothing says when a step begins, whether the caller knows that none is running. By default the
        training thread does, and no other one.
        """
        deadline = time.monotonic() + timeout
        if not self._changed.acquire(timeout=timeout):
            yield False
            return
        try:
            self._wanted += 1
            mine = threading.get_ident() == self._trainer
            if self._implied and (mine if between is None else between):
                quiet = True
            else:
                quiet = not self._stepping if mine else self._wait(deadline)
            with _outside_inference():
                yield quiet
        finally:
            self._wanted -= 1
            self._changed.notify_all()
            self._changed.release()

    def _wait(self, deadline: float) -> bool:
        while not self._over:
            now = time.monotonic()
            settled = self._at_gate or now >= self._settled_at
            if not self._stepping and settled:
                return True
            if now >= deadline:
                return False
            limit = deadline if self._stepping else min(deadline, self._settled_at)
            self._changed.wait(limit - now)
        return False


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Whoever evaluates may save as well. Writes to tensors that are made in `torch.inference_mode` are not counted by
    torch, or refused: what a session keeps must not be of that kind.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
