"""Prevent an optimizer's step and a flush from another thread from overlapping.

A flush never copies during a step: it waits until the step has ended, and until the loop has declared that, if it
does. During a flush the next step waits at the gate, while forward and backward continue. A flush waits only up to a
time limit. So neither can block the other forever.

A loop without hooks may run each iteration in a `block`. Then no step is running outside of blocks, in any thread.
Blocks run one after the other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from scarctl.errors import UsageError

_ALIVE = 0.25
"""Seconds between two looks whether the training thread still exists."""


class Gate:
    """The gate between one training thread, which enters and leaves, and threads that request `quiet`.

    stepping: whether a step counts as running from the start. If no hook reports the beginning of a step, it begins
    when the previous one has ended.
    """

    def __init__(self, *, stepping: bool) -> None:
        self._lock = threading.RLock()  # quicker to take than the condition around it
        self._changed = threading.Condition(self._lock)
        self._held = _Held(self._lock)
        self._stepping = stepping
        self._implied = stepping
        self._blocks = self._torn = self._frozen = False
        self._block: object | None = None
        """The block that runs."""
        self._wanted = 0
        self._at_gate = self._over = False
        self._undeclared = False
        """A step has ended, and the loop has not said yet that all that belongs to it is done."""
        self._trainer = threading.get_ident()

    @property
    def stepping(self) -> bool:
        """Whether a step is running, so that parameters may be partly changed."""
        return self._stepping

    @property
    def implied(self) -> bool:
        """Whether a step counts as running because nothing reports when one begins."""
        return self._implied

    @property
    def blocks(self) -> bool:
        """Whether the loop runs its iterations in blocks."""
        return self._blocks

    @property
    def torn(self) -> bool:
        """Whether the newest block has raised an exception: its changes may be incomplete."""
        return self._torn

    @property
    def trainer(self) -> int:
        """Identifier of the training thread."""
        return self._trainer

    def held(self) -> _Held:
        """Exclude other threads from `held` and `quiet`. May be nested."""
        return self._held

    def enter(self) -> None:
        """Begin a step: wait for a running flush. The calling thread becomes the training thread."""
        with self._lock:
            self._trainer = threading.get_ident()
            if self._stepping and not self._block:
                return
            if self._wanted:
                self._at_gate = True
                self._changed.notify_all()
                try:
                    self._changed.wait_for(lambda: not self._wanted)
                finally:
                    self._at_gate = False
            self._stepping = True
            if self._block:
                self._blocks, self._implied, self._torn = True, False, False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Run one iteration: wait for a running one and for a flush. Call `enter` and `leave` inside.

        Without `leave` the state is `torn` afterwards. Raises UsageError inside another block of this thread.
        """
        block = object()
        try:  # Ctrl-C may come at any point
            with self._changed:
                self.require_outside("session.iteration()")
                self._changed.wait_for(
                    lambda: not (self._block or self._wanted or self._frozen) or self._over
                )
                self._trainer, self._block = threading.get_ident(), block
            yield
        finally:
            with self._changed:
                if self._block is block:
                    self._block = None
                    self._torn = self._stepping and not self._implied
                    self._changed.notify_all()

    def require_outside(self, call: str) -> None:
        """Raise UsageError if this thread runs a block. call: what was called."""
        if self._block and self._trainer == threading.get_ident():
            raise UsageError(
                f"{call} is called within a block of session.iteration(), whose changes are not complete",
                hint="call it after the block; a coroutine must not await within one",
            )

    @contextmanager
    def outside(self, call: str) -> Iterator[None]:
        """Wait for the end of a block in another thread, then do as `held`. Raises UsageError in one of this thread."""
        with self._changed:
            if self._stepping:  # a recovery that was requested comes at a block's end
                self.require_outside(call)
            mine = threading.get_ident()
            self._changed.wait_for(lambda: not self._block or self._trainer == mine or self._over)
            with self._held:
                yield

    def freeze(self) -> None:
        """Let no block begin from now on, nor pass `thaw`: a signal ends the process, and nothing more is saved."""
        with self._lock:
            self._frozen = True

    def thaw(self) -> None:
        """Wait forever if frozen."""
        with self._changed:
            self._changed.wait_for(lambda: not self._frozen)

    def leave(self, *, declared: bool = True) -> None:
        """End the step. declared: all that belongs to it is done; otherwise call `leave` again once it is."""
        with self._lock:
            self._stepping, self._undeclared = False, not declared
            if self._wanted:
                self._changed.notify_all()

    def end(self) -> None:
        """Stop every wait for a step, because no more steps will come."""
        with self._lock:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def quiet(self, timeout: float, *, between: bool | None = None) -> Iterator[bool]:
        """Wait up to `timeout` seconds until no step is running; yield whether that succeeded. No step begins inside.

        between: whether the caller knows that no step is running, in case no hook reports the beginning of one. By
        default only the training thread does. False: a block that has raised still counts as running.
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
            elif mine:
                quiet = not self._stepping or (self._torn and between is not False)
            else:
                quiet = self._wait(deadline, torn=between is not False)
            with _outside_inference():
                yield quiet
        finally:
            self._wanted -= 1
            self._changed.notify_all()
            self._changed.release()

    def _wait(self, deadline: float, *, torn: bool) -> bool:
        """Return whether no step is running. torn: the answer after a block that has raised."""
        while not self._over:
            if self._torn:
                return torn
            now = time.monotonic()
            if not self._stepping and (self._at_gate or not self._undeclared):
                return True
            if now >= deadline or not self._trains():
                return not self._stepping
            self._changed.wait(min(deadline - now, _ALIVE))  # a thread that ends does not notify
        return False

    def _trains(self) -> bool:
        """Return whether the training thread runs Python code, so that a step may still end."""
        return self._trainer in sys._current_frames()


class _Held:
    """See `Gate.held`. Entered several times per step: a generator, or an object for each time, would take longer."""

    __slots__ = ("_depth", "_left", "_lock")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._depth = 0
        """How often the thread that has the lock has taken it."""
        self._left: list[tuple[int, AbstractContextManager[None]]] = []
        """The inference modes that it has left, with the depths."""

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        try:
            if torch.is_inference_mode_enabled():
                left = _outside_inference()
                left.__enter__()
                self._left.append((self._depth, left))
        except BaseException:
            self._depth -= 1
            self._lock.release()
            raise

    @contextmanager
    def soon(self, seconds: float) -> Iterator[bool]:
        """Do the same if the lock is free within so many seconds. Yield whether it was."""
        if not self._lock.acquire(timeout=seconds):
            yield False
            return
        try:
            with self:
                yield True
        finally:
            self._lock.release()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._left and self._left[-1][0] == self._depth:
                self._left.pop()[1].__exit__(*error)
        finally:
            self._depth -= 1
            self._lock.release()


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Leave `torch.inference_mode` inside, so that an evaluation can save as well.

    Torch refuses writes to tensors created in that mode, or does not count them. So a session must not keep any.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
