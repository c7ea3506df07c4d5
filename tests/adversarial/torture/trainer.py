"""Train, as the process that is tortured. It writes its deeds to a file, a line of JSON each.

{"resumed": step, ...}                  resume() gave a whole state, which was checked
{"step": s, "durable": [versions]}      a step is over; what is acknowledged then
{"handed": s, "ids": [...]}             these partitions' copies of step s are in memory
{"sealed": s}                           the whole state of step s is durable
{"rollback": true}                      everything is about to go back to a sealed state
{"closed": s, ...}                      the session was closed after step s
{"gave_up": trace, "kind": kind}        saving was not possible: another process has to continue
{"failed": trace}                       something is wrong
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import scarctl
from scarctl.checkpoint.copied import Copied
from scarctl.checkpoint.engine import Engine
from scarctl.errors import Unavailable
from scarctl.state.version import step_of
from tests.adversarial.torture.episode import Episode
from tests.support import stepper

STOP = "stop"
"""A file next to the store: a process that finds it closes its session and ends."""


class Clock:
    """Counts steps as a learning-rate schedule does: after the optimizer."""

    def __init__(self) -> None:
        self.ticks = 0

    def state_dict(self) -> dict[str, int]:
        return {"ticks": self.ticks}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.ticks = state["ticks"]


class Trainer:
    """One process's run."""

    def __init__(self, episode: Episode, store: Path, log: int) -> None:
        self.log = log
        self.stop = store.parent / STOP
        self.episode = episode
        self.position = {"step": 0}
        self.clock = Clock()
        self.model, self.optimizer = stepper.build()
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            schedulers=self.clock,
            extras={"position": self.position},
            partitioning=scarctl.Partitioning(shards=episode.shards, rows={"*": episode.rows}),
            selection=scarctl.Selection(policy=episode.policy),
            interval=episode.interval,
            fraction=episode.fraction,
            hooks="begin",
        )

    def tell(self, **fields: Any) -> None:
        """Write one whole line at once: the process may be killed right after."""
        os.write(self.log, json.dumps(fields).encode() + b"\n")

    def train(self, seed: str) -> None:
        """Resume, check, and train until asked to stop."""
        rng = random.Random(seed)
        self._tell_of_copies()
        self._resume()
        step = self.session.head_step
        while not self.stop.exists():
            time.sleep(rng.uniform(0.0, self.episode.pause))
            step += 1
            self.position["step"] = step
            self.optimizer.step()
            self.clock.ticks = step
            self.session.step()
            if self.episode.meddles:
                self._meddle()
            assert self.session._engine is not None
            self.tell(step=step, durable=self.session._engine.arena.durable.tolist())
            event = rng.random()
            if event < 0.01:
                self.session.checkpoint(full=True, wait=True)
                self.tell(sealed=step)
            elif event < 0.015 and step > 5:
                step = self._roll_back()
        self.session.close()
        stats = self.session.stats
        self.tell(closed=step, errors=stats.errors, last_error=stats.last_error)

    def _resume(self) -> None:
        resumed = self.session.resume()
        if resumed.report is None:
            self.tell(resumed=0, consistent=True)
            return
        assert (self.position["step"], self.clock.ticks) == (resumed.step, resumed.step), "extras"
        values = self._values()
        steps = step_of(resumed.report.plan.version)
        wrong = [
            (i, label, value)
            for i, (label, value) in enumerate(zip(steps.tolist(), values, strict=True))
            if label != value
        ]
        assert not wrong, f"(partition, step, value) that resume() gave: {wrong}"
        assert not resumed.consistent or set(values) == {resumed.step}, "resume() is not exact"
        self._fill(resumed.step)
        self.tell(resumed=resumed.step, consistent=resumed.consistent, tiers=resumed.report.tiers)

    def _roll_back(self) -> int:
        self.tell(rollback=True)
        report = self.session.recover("all", mode="rollback")
        assert report.step is not None
        assert set(self._values()) == {report.step}, "a rollback is not exact"
        self.position["step"] = self.clock.ticks = report.step
        self.tell(rolled_back=report.step)
        return report.step

    def _meddle(self) -> None:
        """Change values for a moment, and set them back."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.25)
                parameter.sub_(0.25)

    def _values(self) -> list[int]:
        """Return the value of every partition. Raises AssertionError if a partition holds several."""
        values = []
        for name, parameter in self.model.named_parameters():
            whole = [parameter.detach(), self.optimizer.state[parameter]["count"]]
            for first in range(0, parameter.shape[0], self.episode.rows):
                pieces = [tensor[first : first + self.episode.rows] for tensor in whole]
                held = [piece.unique().tolist() for piece in pieces]
                assert [len(found) for found in held] == [1, 1], f"{name}[{first}] is torn: {held}"
                assert int(held[0][0]) == int(held[1][0]), f"{name}[{first}] is mixed: {held}"
                values.append(int(held[0][0]))
        return values

    def _fill(self, value: int) -> None:
        """Continue from whole numbers: from here on every value is its step again."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
                self.optimizer.state[parameter]["count"].fill_(value)

    def _tell_of_copies(self) -> None:
        """Write messages about copies that are in memory, without changing them."""
        complete = Engine.complete

        def telling(engine: Engine, copied: Copied, extras: Any, whole: str) -> Copied:
            copied = complete(engine, copied, extras, whole)
            self.tell(handed=copied.step, ids=copied.ids.tolist())
            return copied

        Engine.complete = telling  # type: ignore[method-assign]


def run(episode: Episode, store: Path, log: int, seed: str) -> int:
    """Run the whole life of the process; return its exit status."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2)  # prints where it hangs, if it does
    try:
        Trainer(episode, store, log).train(seed)
    except Unavailable as error:
        os.write(log, json.dumps({"gave_up": traceback.format_exc(), "kind": error.kind}).encode() + b"\n")
        return 1
    except BaseException:
        os.write(log, json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
        return 1
    return 0
