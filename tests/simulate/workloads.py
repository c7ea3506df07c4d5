"""Provide workloads for tests, each with a difficulty for a simulation."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.simulate.quadratic import Quadratic

__all__ = ["Quadratic", "quadratic"]


def quadratic() -> Quadratic:
    return Quadratic()


class Dropout:
    """A torch model with Adam, dropout, a schedule and noise of its own: a rollback must restore all of it."""

    iterations = 24
    partition_bytes = 64

    def reset(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
        )
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=0.02)
        self._noise = np.random.default_rng(seed)
        self.extras = {"noise": self._noise}
        self._x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
        self._y = self._x.sum(dim=1, keepdim=True)

    def state(self) -> Any:
        return self._model, self._optimizer

    def step(self, iteration: int) -> None:
        self._model.train()
        noise = torch.from_numpy(self._noise.normal(0, 0.1, self._x.shape)).float()
        loss = torch.nn.functional.mse_loss(self._model(self._x + noise), self._y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def metric(self) -> float:
        self._model.eval()
        return float(torch.nn.functional.mse_loss(self._model(self._x), self._y))


class Overshoot:
    """Two partitions, one of which first makes the metric worse: losing that one is a gain."""

    iterations = 60

    def reset(self, seed: int) -> None:
        self._state = {"good": np.full(4, 10.0), "bad": np.zeros(4)}

    def state(self) -> Any:
        return self._state

    def step(self, iteration: int) -> None:
        self._state["good"] *= 0.9
        # Replaced, not changed in place: a loop may do that.
        self._state["bad"] = self._state["bad"] + 1 if iteration <= 20 else self._state["bad"] * 0.9

    def metric(self) -> float:
        return float(self._state["good"].sum() + self._state["bad"].sum())


class Unseeded(Quadratic):
    """The seed does not determine everything."""

    def reset(self, seed: int) -> None:
        super().reset(time.time_ns() % 2**32)


class Diverging(Quadratic):
    def step(self, iteration: int) -> None:
        self._state["x"] *= np.nan


class Raising(Quadratic):
    def step(self, iteration: int) -> None:
        raise ZeroDivisionError("seven")


class Dying(Quadratic):
    def step(self, iteration: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Slow(Quadratic):
    """Leaves a mark for each trial that begins, and takes a while."""

    def reset(self, seed: int) -> None:
        super().reset(seed)
        with Path("marks").open("a") as marks:
            marks.write(f"{seed}\n")
        time.sleep(0.05)


class NeedsData(Quadratic):
    def __init__(self, folder: str) -> None:
        self.iterations = int((Path(folder) / "iterations").read_text())


class Incomplete:
    iterations = 10

    def step(self, iteration: int) -> None:
        sys.exit("never called")


class Timeless(Quadratic):
    iterations = 0


not_callable = 3
