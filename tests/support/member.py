"""Run a member of a store as a program: it trains until it is killed, or until the file `stop` exists.

    python -m tests.support.member STORE FOLDER NUMBER COUNT OPTIONS

It appends what it has resumed, or its error, to FOLDER/NUMBER.jsonl, and keeps its step in FOLDER/steps. A step adds 1
to every value, so that a row of different values is of two steps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import scarctl
from scarctl.config import grouped
from scarctl.errors import ScarError
from scarctl.store import Store
from tests.support.forkserver import Program

ROWS = 16
PATIENCE = 90.0
"""Seconds until a missing condition fails the test."""


def state_of(number: int) -> dict[str, np.ndarray]:
    return {"rows": np.full((ROWS, 4), float(number)), "bias": np.zeros(4)}


def attached(store: Path | str, number: int, count: int, state: Any, **options: Any) -> scarctl.Session:
    settings = {"interval": 2, "rows": {"rows": 1}, "on_error": "raise", "timeout": 30.0, **options}
    return scarctl.attach(state, store=store, member=(number, count), **grouped(**settings))


def train(session: scarctl.Session, state: dict[str, np.ndarray], steps: int) -> None:
    for _ in range(steps):
        for values in state.values():
            values += 1
        session.step()


def main(store: str, folder: str, number: str, count: str, options: str) -> int:
    faulthandler.register(signal.SIGUSR1)
    log, state = Path(folder, f"{number}.jsonl"), state_of(int(number))
    steps = np.memmap(Path(folder, "steps"), np.int64, "r+", shape=(int(count),))

    def tell(**what: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    try:
        session = attached(store, int(number), int(count), state, **json.loads(options))
        resumed = session.resume()
        tiers = {} if resumed.report is None else dict(resumed.report.tiers)
        tell(step=resumed.step, consistent=resumed.consistent, tiers=tiers, torn=torn(state))
        while not Path(folder, "stop").exists():
            train(session, state, 1)
            steps[int(number)] = session.head_step
            time.sleep(0.02)  # others need the processor, too
        session.close()
    except ScarError as error:
        tell(error=error.kind, message=str(error))
        return error.exit_code
    return 0


def torn(state: dict[str, np.ndarray]) -> int:
    """Return how many rows are of two steps."""
    return int((state["rows"] != state["rows"][:, :1]).any(axis=1).sum())


class Members:
    """Members of one store, each a process that can be killed."""

    def __init__(self, store: Path | str, folder: Path, count: int, **options: Any) -> None:
        self.store, self.folder, self.count, self.options = store, folder, count, options
        self.programs: dict[int, Program] = {}
        self.everyone: list[Program] = []
        folder.mkdir(exist_ok=True)
        np.zeros(count, np.int64).tofile(folder / "steps")
        self._steps = np.memmap(folder / "steps", np.int64, "r", shape=(count,))

    def start(self, numbers: Sequence[int], *, env: dict[str, str] | None = None) -> None:
        for number in numbers:
            words = [
                str(self.store),
                str(self.folder),
                str(number),
                str(self.count),
                json.dumps(self.options),
            ]
            with (self.folder / f"{number}.err").open("ab") as errors:
                program = Program(
                    ["-m", "tests.support.member", *words],
                    env={**os.environ, **(env or {})},
                    stdout=errors,
                    stderr=errors,
                )
            self.programs[number] = program
            self.everyone.append(program)

    def told(self, number: int) -> list[dict[str, Any]]:
        file = self.folder / f"{number}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the condition. Fails at once if a member has ended that was not killed."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = [
                n for n, program in self.programs.items() if program.poll() not in (None, -signal.SIGKILL)
            ]
            assert not ended, f"members {ended} have ended before: {what}\n{self._seen(ended)}"
            assert time.monotonic() < deadline, (
                f"not after {PATIENCE:g} s: {what}\n{self._seen(self._last())}"
            )
            time.sleep(0.01)

    def _last(self) -> list[int]:
        """Return the two members that have taken the fewest steps."""
        return sorted(self.programs, key=lambda number: self.steps()[number])[:2]

    def _seen(self, numbers: Sequence[int]) -> str:
        """Return the messages of these members, and the stacks of running ones: for the message of a failing test."""
        for number in numbers:
            self.programs[number].send_signal(signal.SIGUSR1)
        time.sleep(1)
        lines = [f"steps {self.steps()}"]
        for number in numbers:
            program = self.programs[number]
            errors = (self.folder / f"{number}.err").read_text()[-3000:]
            lines.append(f"member {number}: exit code {program.poll()}, {self.told(number)[-1:]}\n{errors}")
        return "\n".join(lines)

    def steps(self) -> list[int]:
        return [int(step) for step in self._steps]

    def until_steps(self, more: int, numbers: Sequence[int]) -> None:
        """Wait until each has taken `more` further steps."""
        before = self.steps()
        self.until(
            lambda: all(self.steps()[n] >= before[n] + more for n in numbers),
            f"members {numbers} {more} steps after {before}",
        )

    def kill(self, number: int) -> None:
        self.programs[number].kill()
        assert self.programs[number].wait() == -signal.SIGKILL

    def stop(self) -> list[int]:
        """End all of them, and return their exit codes."""
        (self.folder / "stop").touch()
        return [self.programs[number].wait(PATIENCE) for number in sorted(self.programs)]

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.everyone:
            program.kill()
            with contextlib.suppress(ProcessLookupError):
                program.wait()
        (self.folder / "stop").unlink(missing_ok=True)


def epochs(store: Store) -> dict[int, int]:
    """Return the epoch of each shard's newest record."""
    found = {shard: store.log(shard).newest() for shard in store.shards()}
    return {shard: record.epoch for shard, record in found.items() if record is not None}


def owners(store: Store, shard: int) -> Iterator[int]:
    """Yield the epochs of a shard's records, oldest first."""
    for record in store.log(shard).records():
        yield record.epoch


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
