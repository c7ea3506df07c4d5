"""Run a server of weights as a process that can be killed, and keep its state with scarctl."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import scarctl
from examples.parameter_server.model import Vector

ROW = 256
"""Values in a row of the state: the unit that a partial checkpoint saves."""


@dataclass(frozen=True)
class Keeping:
    """How a server keeps its weights. store "": not at all."""

    store: str = ""
    member: tuple[int, int] | None = None
    full_every: int = 0
    """Updates from one durable checkpoint of the whole state to the next, which is what a new process gets."""
    flush: bool = False
    """The weights lie in the arena after every update, so that a new process continues from exactly these."""


def serve(connection: Connection, weights: Vector, keeping: Keeping, arena: str) -> None:
    """Apply gradients until the other end is gone. The first answer is the resumed step."""
    rows = -(-len(weights) // ROW)
    state = {"weights": np.zeros((rows, ROW), np.float32)}
    flat = state["weights"].reshape(-1)
    flat[: len(weights)] = weights
    session = None
    if keeping.store:
        session = scarctl.attach(
            state,
            store=keeping.store,
            member=keeping.member,
            interval=2,
            fraction=0.25,
            settings=scarctl.Settings(arena_dir=arena, daemon=False),
        )
        try:
            session.resume(mode="rollback" if keeping.full_every else "partial")
        except scarctl.NoIntactCopy:
            session.supersede()  # it was killed before its first checkpoint
    connection.send(0 if session is None else session.head_step)
    while True:
        try:
            what, value, rate = connection.recv()
        except EOFError:
            os._exit(0)  # the experiment is over: nothing has to be saved
        if what == "apply":
            with contextlib.nullcontext() if session is None else session.iteration():
                flat[: len(weights)] -= rate * value
            if session is not None:
                if keeping.full_every and session.head_step % keeping.full_every == 0:
                    session.checkpoint(full=True, wait=True)
                if keeping.flush:
                    session.flush()
        elif what == "load":
            flat[: len(weights)] = value
        connection.send(flat[: len(weights)].copy())


class Server:
    """The other side: starts it, asks it, kills it with -9."""

    def __init__(self, weights: Vector, keeping: Keeping, arena: str) -> None:
        self.first, self.keeping, self.arena = weights, keeping, arena
        self.weights = weights
        """The weights of its newest answer."""
        self.alive = False
        self.seconds: list[float] = []
        """Duration of each start."""
        self.start()

    def start(self) -> int:
        """Start a process, and return the step from which it continues."""
        began = time.monotonic()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["examples.parameter_server.server", "scarctl.session.session"])
        self._connection, its = context.Pipe()
        self._process = context.Process(
            target=serve, args=(its, self.first, self.keeping, self.arena), daemon=True
        )
        self._process.start()
        its.close()
        step: int = self._connection.recv()
        self.alive = True
        self.ask("look")
        self.seconds.append(time.monotonic() - began)
        return step

    def ask(self, what: str, value: Any = None, rate: float = 0.0) -> Vector:
        """Send a command, and return the weights after it."""
        self._connection.send((what, value, rate))
        self.weights = self._connection.recv()
        return self.weights

    def kill(self) -> None:
        """End it at once."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._connection.close()
        self.alive = False

    def memory(self) -> int:
        """Return bytes of the process's memory."""
        if not self.alive:
            return 0
        with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
