"""Run one process on one host: it resumes, trains some steps, and closes or dies. Return its messages."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import scarctl
from scarctl.arena.folder import host_folder
from scarctl.daemon.client import question
from scarctl.errors import ScarError

STEPS = 1000
"""More steps than a life has: value = life * STEPS + step."""
SHAPES = {"a": (8, 4), "b": (5, 3)}
ROWS = sum(rows for rows, _ in SHAPES.values())
NEVER = -1.0
PATIENCE = 60.0
Values = tuple[float, ...]
"""The value of each partition; NEVER: it has no copy."""


class Violation(Exception):
    """A condition does not hold."""


@dataclass(frozen=True)
class Plan:
    """The actions of one process."""

    mode: str = "partial"
    steps: int = 6
    durable: int = 0
    """The life's own step after which the whole state is sealed and durable; 0: never."""
    stopped: int = 0
    """The life's own step after which nothing more reaches the store; 0: never."""
    drained: bool = False
    """Before its end it waits until the store has all copies."""
    end: str = "kill"
    """"kill": by SIGKILL; "close": as a finished program."""
    daemon: str = ""
    """"": a thread saves; "stays": the host's daemon, which continues; "dies": the daemon is killed as well."""


@dataclass(frozen=True)
class Told:
    """The report of a process."""

    step: int
    consistent: bool
    values: Values
    """The values after `resume`."""
    left: Values = ()
    """The values in its memory when it died."""
    found: bool = True
    """Whether there was a state to resume."""
    error: str = ""


def live(store: Path, host: Path, life: int, plan: Plan) -> Told:
    """Run the life of a process."""
    warm()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            logging.disable(logging.CRITICAL)
            _live(writing, store, host, life, plan)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = [json.loads(line) for line in pipe.read().splitlines()]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not lines or status not in (0, -signal.SIGKILL):
        raise Violation(f"life {life} has ended with {status}: {lines}")
    if plan.daemon == "dies":
        kill_daemon(host)
    elif plan.daemon:
        wait_for_daemon(host)
    first, last = lines[0], lines[-1]
    if "error" in first:
        return Told(0, False, (), error=first["error"])
    left = tuple(last["left"]) if plan.end == "kill" else ()
    return Told(first["step"], first["consistent"], tuple(first["values"]), left, first["found"])


@cache
def warm() -> None:
    """Import a session's modules here, once, and not in every child."""
    with tempfile.TemporaryDirectory() as folder:
        state = {"a": np.zeros((2, 2))}
        session = scarctl.attach(
            state,
            store=f"{folder}/run",
            settings=scarctl.Settings(arena_dir=folder, daemon=False, flush_on_signal=False),
        )
        session.step()
        session.close()
        session = scarctl.attach(
            state,
            store=f"{folder}/run",
            settings=scarctl.Settings(arena_dir=folder, daemon=False, flush_on_signal=False),
        )
        session.resume()
        session.close()


def _live(pipe: int, store: Path, host: Path, life: int, plan: Plan) -> None:
    def tell(**fields: Any) -> None:
        os.write(pipe, json.dumps(fields).encode() + b"\n")

    state = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    session = scarctl.attach(
        state,
        store=store,
        fraction=0.3,
        interval=2,
        partitioning=scarctl.Partitioning(rows={"*": 1}, shards=2, seed=3),
        selection=scarctl.Selection(policy="round"),
        settings=scarctl.Settings(
            arena_dir=host, daemon=bool(plan.daemon), flush_on_signal=False, timeout=20.0
        ),
    )
    try:
        resumed = session.resume(plan.mode)
    except ScarError as error:
        tell(error=error.kind)
        session.close(seal=False)
        return
    tell(
        step=resumed.step,
        consistent=resumed.consistent,
        values=_values(state),
        found=resumed.report is not None,
    )
    engine = session._engine
    for n in range(1, plan.steps + 1):
        for array in state.values():
            array[:] = life * STEPS + session.head_step + 1
        session.step()
        engine = session._engine
        assert engine is not None
        if n == plan.durable:
            session.checkpoint(full=True, wait=True)
        if n == plan.stopped:
            session._saving.finish()
            engine.saver.stop()
    session._saving.finish()
    if plan.drained and engine is not None and not engine.saver.drain(20.0):
        return
    if plan.end == "close":
        session.close()
        return
    arena = None if engine is None else engine.arena
    left = [NEVER] * ROWS
    if arena is not None:
        rows = [
            float(arena.rows(g, 0).view(np.float64)[r, 0])
            for g, (n, _) in enumerate(SHAPES.values())
            for r in range(n)
        ]
        left = [v if there else NEVER for v, there in zip(rows, arena.intact().tolist(), strict=True)]
    tell(left=left)
    if plan.daemon == "dies" and (answer := question(host_folder(str(host)), "status", patience=PATIENCE)):
        os.kill(answer["pid"], signal.SIGKILL)  # before it can save the copies that this process leaves
    os.kill(os.getpid(), signal.SIGKILL)


def _values(state: dict[str, np.ndarray]) -> list[float]:
    """Return the value of each partition. Raises for a torn partition."""
    rows = [row for array in state.values() for row in array]
    return [float(row[0]) if (row == row[0]).all() else 0.5 for row in rows]


def kill_daemon(host: Path) -> None:
    """Kill the daemon, as the host dies with its last process."""
    answer = question(host_folder(str(host)), "status", patience=PATIENCE)
    if answer is not None:
        os.kill(answer["pid"], signal.SIGKILL)
        _wait(lambda: question(host_folder(str(host)), "status", patience=PATIENCE) is None)


def wait_for_daemon(host: Path) -> None:
    """Wait until the copies of the dead process are in the store."""
    _wait(lambda: not (question(host_folder(str(host)), "status", patience=PATIENCE) or {"runs": []})["runs"])


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise Violation("a daemon does not come to its end")
        time.sleep(0.01)
