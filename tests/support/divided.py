"""Run members that divide one table among them, each a process of its own that can be killed at a named point.

    python -m tests.support.divided STORE NUMBER COUNT STEPS OPTIONS

Every step adds the row's number plus one to a row, so that a row shows after how many steps it was saved. `OPTIONS`
are those of `attach`, and `replaces`, `after`, `kill` (a name such as "scarctl.distributed.heir.fence") and `when`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import scarctl
from scarctl.config import grouped
from scarctl.errors import ScarError
from tests.support.forkserver import Program

ROWS = 24
WIDTH = 2


def rows_of(number: int, count: int) -> tuple[int, int]:
    return ROWS * number // count, ROWS * (number + 1) // count


def state_of(number: int, count: int) -> dict[str, np.ndarray]:
    first, stop = rows_of(number, count)
    return {"table": np.zeros((stop - first, WIDTH))}


def attached(
    store: Path | str,
    number: int,
    count: int,
    state: Any,
    *,
    replaces: int | None = None,
    after: int | None = None,
    **options: Any,
) -> scarctl.Session:
    settings = {"interval": 1, "rows": {"table": 1}, "on_error": "raise", "timeout": 30.0, **options}
    member = scarctl.Member(number, count, {"table": (rows_of(number, count)[0], ROWS)}, replaces, after)
    return scarctl.attach(state, store=store, member=member, **grouped(**settings))


def train(
    session: scarctl.Session, state: dict[str, np.ndarray], number: int, count: int, steps: int
) -> None:
    first, stop = rows_of(number, count)
    for _ in range(steps):
        state["table"] += np.arange(first + 1, stop + 1)[:, None]
        session.step()


def run_member(
    store: Path | str, number: int, count: int, steps: int, **options: Any
) -> tuple[scarctl.session.recover.Resumed, list[int]]:
    """Start one member, train it and end it. Return what it resumed, and the steps that its rows then had."""
    state = state_of(number, count)
    mode = options.pop("mode", "partial")
    with attached(store, number, count, state, **options) as session:
        resumed = session.resume(mode)
        there = steps_of(state, number, count)
        train(session, state, number, count, steps)
    return resumed, there


def steps_of(state: dict[str, np.ndarray], number: int, count: int) -> list[int]:
    """Return the step of each row. Fails for a torn row."""
    first, stop = rows_of(number, count)
    steps = state["table"] / np.arange(first + 1, stop + 1)[:, None]
    assert (steps == steps[:, :1]).all(), steps
    assert (steps == np.round(steps)).all(), steps
    return [int(step) for step in steps[:, 0]]


def start(store: Path | str, number: int, count: int, steps: int, errors: Path, **options: Any) -> Program:
    words = [str(store), str(number), str(count), str(steps), json.dumps(options)]
    with errors.open("ab") as out:
        return Program(["-m", "tests.support.divided", *words], stdout=out, stderr=out)


def main(words: Sequence[str]) -> int:
    store, number, count, steps, text = words
    options = json.loads(text)
    point, when = options.pop("kill", None), options.pop("when", "before")
    if point is not None:
        _kill_at(point, when)
    try:
        run_member(store, int(number), int(count), int(steps), **options)
    except ScarError as error:
        sys.stderr.write(json.dumps({"error": error.kind, "message": str(error)}) + "\n")
        return error.exit_code
    return 0


def _kill_at(point: str, when: str) -> None:
    """Kill this process before, or after, its first call of a function or method."""
    module, names = point, []
    while True:
        module, _, name = module.rpartition(".")
        names.insert(0, name)
        try:
            holder: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            continue
    for name in names[:-1]:
        holder = getattr(holder, name)
    call = getattr(holder, names[-1])

    def killed(*args: Any, **options: Any) -> Any:
        if when == "after":
            call(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(holder, names[-1], killed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
