"""Provide loops that fail in the middle of an iteration, and what the same loops reach undisturbed.

Run it as a program to have the exception end the process: its arguments are the store, the kind of loop, and where it
fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import scarctl
from scarctl.config import grouped

STEPS, FAILS = 8, 5
KINDS = ("drawn", "batches", "workers", "block")
"""Where the data come from: random numbers with a count in extras, `session.batches`, a DataLoader with a worker and a
count in extras, or as "drawn", with the rest of the iteration in a block."""
PLACES = ("drawn", "forward")
"""Where it fails in an iteration: after the batch was drawn, or after the forward pass."""


class Broken(Exception):
    """The failure."""


def data(size: int = 4 * STEPS) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.rand(8, generator=generator), number % 2) for number in range(size)]


class Failing:
    """A loop with dropout, whose data come from one of several sources."""

    def __init__(self, store: Path | str, kind: str, **options: Any) -> None:
        torch.manual_seed(1)
        self.kind = kind
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.position = {"batches": 0}
        given: dict[str, Any] = {"hooks": "off"} if kind == "block" else {}
        extras = options.pop("extras", {})
        given["extras"] = extras if kind == "batches" else {"position": self.position, **extras}
        options = {"policy": "full", "interval": 100, "flush_on_signal": False, "daemon": False, **options}
        self.session = scarctl.attach(self.model, self.optimizer, store=store, **given, **grouped(**options))
        self.resumed = self.session.resume()

    def train(self, fails: str = "", at: int = FAILS) -> None:
        """Train to the end. fails: where it raises Broken in the iteration after step `at`; "" for nowhere."""
        for x, y in self._data():
            if self.session.head_step == at and fails == "drawn":
                raise Broken
            if self.kind == "block":
                self._forward(x, y, fails if self.session.head_step == at else "")
                with self.session.iteration():
                    self.optimizer.step()
            else:
                self._forward(x, y, fails if self.session.head_step == at else "")
                self.optimizer.step()
            if self.session.head_step == STEPS:
                break

    def _forward(self, x: torch.Tensor, y: torch.Tensor, fails: str) -> None:
        loss = functional.cross_entropy(self.model(x), y)
        if fails:
            raise Broken
        self.optimizer.zero_grad()
        loss.backward()

    def _data(self) -> Iterator[Any]:
        if self.kind == "batches":
            for _ in self.session.epochs(2):
                yield from self.session.batches(DataLoader(data(), 4, shuffle=True))  # type: ignore[arg-type]
        elif self.kind == "workers":
            for number, batch in enumerate(DataLoader(data(), 4, num_workers=1)):  # type: ignore[arg-type]
                if number >= self.position["batches"]:
                    self.position["batches"] += 1
                    yield batch
        else:
            items = data()
            while True:
                chosen = torch.randint(0, len(items), (4,)).tolist()
                self.position["batches"] += 1
                yield torch.stack([items[n][0] for n in chosen]), torch.tensor([items[n][1] for n in chosen])

    def reached(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Failing(sys.argv[1], sys.argv[2]).train(sys.argv[3])
