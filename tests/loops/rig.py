"""Provide what the programs of the table of loops share: a run that is stopped, data, a model."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

import scarctl
from scarctl.config import grouped
from tests.support.training import drain

EPOCHS, PER_EPOCH = 3, 5
STEPS = EPOCHS * PER_EPOCH


class Run:
    """The arguments of a program."""

    def __init__(self, store: str, stop: str, at: int) -> None:
        self._store, self._stop, self._at = store, stop, at
        self._models: list[nn.Module] = []
        self._sessions: list[scarctl.Session] = []

    def attach(self, model: nn.Module, optimizer: Any, **options: Any) -> scarctl.Session:
        """Make the run's session."""
        if model not in self._models:
            self._models.append(model)
        settings = {"policy": "full", "interval": 1, "partition_bytes": 4096, **options}
        self.session = scarctl.attach(model, optimizer, store=self._store, **grouped(**settings))
        self._sessions.append(self.session)
        last = optimizer[-1] if isinstance(optimizer, list) else optimizer
        last.register_step_post_hook(lambda *_: self._stepped())
        return self.session

    def resume(self) -> int:
        self.resumed = self.session.resume("rollback" if os.environ.get("ROLL_BACK") else "partial")
        return self.resumed.step

    def _stepped(self) -> None:
        if self._stop == "SIGKILL":
            # So that every step is sealed: a newer copy would replace one that waits for the store.
            drain(self.session)
        if self._stop.startswith("SIG") and self.session.head_step == self._at:
            os.kill(os.getpid(), getattr(signal, self._stop))

    def iterated(self) -> None:
        """Note the end of an iteration."""
        if self._stop == "close" and self.session.head_step == self._at:
            self.session.close()
            self._end()

    def _end(self) -> NoReturn:
        sys.stdout.flush()
        os._exit(0)

    def done(self) -> None:
        digest = hashlib.sha256()
        for model in self._models:
            for tensor in model.state_dict().values():
                digest.update(tensor.numpy().tobytes())
        resumed = [session.resumed for session in self._sessions if session.resumed is not None]
        found = {
            "digest": digest.hexdigest()[:16],
            "head": self.session.head_step,
            "step": sum(one.step for one in resumed),
            "consistent": all(one.consistent for one in resumed),
            "declared": all(one.declared for one in resumed),
            "reasons": [reason for one in resumed for reason in one.reasons],
        }
        self.session.close()
        sys.stdout.write(json.dumps(found) + "\n")


class Digits(Dataset[Any]):
    """Random features. noise: drawn again each time, as by an augmentation."""

    def __init__(self, size: int = 4 * PER_EPOCH, *, noise: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.rand(size, 8, generator=generator), torch.arange(size) % 2
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return (x + 0.1 * torch.rand(8) if self.noise else x), self.y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(7)
        for index in range(4 * PER_EPOCH):
            yield torch.rand(8, generator=generator), index % 2


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))


def train(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(Digits(8), batch_size=4, shuffle=True):
            model(x)
    model.train()


def by_step(step: int) -> Any:
    """Return a batch that is a function of the step."""
    generator = torch.Generator().manual_seed(step)
    return torch.rand(4, 8, generator=generator), torch.randint(0, 2, (4,), generator=generator)
