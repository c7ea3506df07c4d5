"""Kill training with SIGKILL at random moments, and check that this host's memory has one whole step after each kill.

    python -m tests.adversarial.kills --rounds 10000 --seed 3

Training copies at full duty, after every step. A step changes a third of the rows, so that it
shows of which step each of them is. The next process resumes from memory: everything that it gets is of one step, with
the extras of that step, and that step is at least the newest one that was in memory when the process before was killed.
Some are killed while they resume. The process that is killed is a fork, so a round takes a few tenths of a second.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import scarctl
from scarctl.config import grouped
from scarctl.state.version import step_of
from scarctl.util.arrays import Ids
from tests.support import forkserver, stepper

PATIENCE = 60.0
"""Seconds after which an expected event counts as missing."""
STATE, MEMORY = range(2)
"""Words that both processes see: what the process does, and the newest step in memory."""
STARTED, TRAINS, FAILED = 1, 2, 3
_LIVES = 100
"""Processes on one store: then a new one is made, with a new memory."""


class Violation(Exception):
    """A promise was broken."""


@dataclass(frozen=True)
class Kill:
    """When a process is killed."""

    resuming: bool
    """Count from its start, and not from its first checkpoint."""
    seconds: float

    @staticmethod
    def draw(seed: int, number: int) -> Kill:
        rng = random.Random(f"kills {seed} {number}")
        resuming = rng.random() < 0.2
        return Kill(resuming, rng.choice((0.0, rng.uniform(0, 0.01), rng.uniform(0, 0.15))))


class Third(torch.optim.Optimizer):
    """Adds one to a third of the rows, other ones in each step, and to a state of the same shape."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make a step."""
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            rows = torch.from_numpy(touched(parameter.shape[0], self.steps, self.steps)).nonzero()[:, 0]
            state = self.state[parameter].setdefault("count", torch.zeros_like(parameter))
            for tensor in (parameter, state):
                tensor[rows] += 1

    def expected(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the values of a parameter after `steps` steps."""
        counts = sum(
            touched(parameter.shape[0], first, min(first + 999, self.steps))
            for first in range(1, self.steps + 1, 1000)
        )
        return torch.from_numpy(np.asarray(counts, np.float32))[:, None].expand_as(parameter)


def touched(rows: int, first: int, last: int) -> Ids:
    """Return how often each row changes in the steps `first` to `last`: int64 of shape (rows,)."""
    row, step = np.arange(rows), np.arange(first, last + 1)
    return ((row[:, None] * 7 + step * 5 + row[:, None] * step) % 3 == 0).sum(axis=1)


def train(store: Path, memory: Path, words: Ids) -> None:
    """Resume, check, and train until killed."""
    model, _ = stepper.build()
    optimizer, position = Third(model), {"step": 0}
    words[STATE] = STARTED
    session = scarctl.attach(
        model,
        optimizer,
        store=store,
        extras={"position": position},
        hooks="begin",
        **grouped(
            arena_dir=str(memory), interval=1, fraction=0.25, daemon=False, on_error="raise", rows={"*": 1}
        ),
    )
    resumed = session.resume()
    known = int(words[MEMORY])
    assert resumed.step >= known, f"step {known} was in memory, and {resumed.step} is what it resumed from"
    optimizer.steps = resumed.step
    if resumed.step:
        assert resumed.report is not None
        assert resumed.consistent, "memory is not of one step"
        assert "memory" in resumed.report.tiers, f"step {resumed.step} came from {resumed.report.tiers}"
        assert position["step"] == resumed.step, f"extras of step {position['step']} with step {resumed.step}"
        for parameter in model.parameters():
            for values in (parameter, optimizer.state[parameter]["count"]):
                wrong = (values != optimizer.expected(parameter)).any(dim=1).nonzero()[:, 0].tolist()
                assert not wrong, f"rows {wrong} are not of step {resumed.step}"
    while True:
        position["step"] = optimizer.steps + 1
        optimizer.step()
        session.step()
        assert session._engine is not None
        if (newest := step_of(session._engine.arena.slot.head)) > max(known, resumed.step):
            words[MEMORY], words[STATE] = newest, TRAINS


def forked(work: Callable[[], None], words: Ids) -> int:
    """Start `work` in a fork, and return its process id. words: get FAILED if it raises."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        words[STATE] = FAILED
    finally:
        os._exit(1)


class Mill:
    """A folder with the store and the memory of all rounds, and the words of the process that trains."""

    def __init__(self, folder: Path, memory: Path) -> None:
        """Prepare. memory: folder of shared memory."""
        self.store, self.memory = folder / "store", memory / "arenas"
        self.words: Ids = np.frombuffer(mmap.mmap(-1, 4096), np.int64, 2)

    def renew(self) -> None:
        """Begin with a new store and a new memory."""
        for folder in (self.store, self.memory):
            shutil.rmtree(folder, ignore_errors=True)
        self.memory.mkdir()
        self.words[:] = 0

    def play(self, kill: Kill) -> None:
        """Start a process, and kill it. Raises Violation."""
        words = self.words
        words[STATE] = 0
        child = forked(lambda: train(self.store, self.memory, words), words)
        try:
            end = time.monotonic() + PATIENCE
            while words[STATE] < (STARTED if kill.resuming else TRAINS):
                if time.monotonic() > end:
                    raise Violation(f"nothing happens for {PATIENCE:.0f} s")
                time.sleep(0.0005)
            time.sleep(kill.seconds)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if words[STATE] == FAILED:
            raise Violation("see above")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="begin with this round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("scarctl").setLevel(logging.ERROR)
    for name in forkserver.TORCH:  # otherwise each fork imports them
        importlib.import_module(name)
    folder = Path(tempfile.mkdtemp(prefix="scarctl-kills-"))
    memory = Path(tempfile.mkdtemp(prefix="scarctl-kills-", dir="/dev/shm"))
    mill, started, done, violations = Mill(folder, memory), time.monotonic(), Counter[str](), 0
    for number in range(args.first, args.rounds):
        if time.monotonic() - started > args.seconds:
            break
        if number % _LIVES == 0:
            mill.renew()
        kill = Kill.draw(args.seed, number)
        try:
            mill.play(kill)
        except Violation as violation:
            violations += 1
            print(f"round {number}, {kill}: {violation}", file=sys.stderr, flush=True)  # noqa: T201
            mill.renew()
        done["while resuming" if kill.resuming else "while training"] += 1
    for place in (folder, memory):
        shutil.rmtree(place)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(done.items()))
    print(  # noqa: T201
        f"seed {args.seed}: {sum(done.values())} kills in {time.monotonic() - started:.0f} s: {counts}; "
        f"{violations} violations"
    )
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
