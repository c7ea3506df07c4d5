"""Train a convolutional network on MNIST with Adam: two convolutions and three full layers, batches of 64.

scarctl simulate examples.paper.cnn:by_shard --data DIR
scarctl simulate examples.paper.cnn:by_layer --data DIR
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from examples.paper.data import mnist

BATCH = 64
CRITERION = 0.08
"""Mean cross-entropy at which a run ends."""
WATCHED = 200
"""Images that the metric looks at, none of which is trained on."""
EPSILON = 1e-8
"""Adam's."""


def curvature(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return distance in which a parameter counts by the root of its second moment, Adam's measure of curvature."""
    weight = live["exp_avg_sq"].sqrt().add_(EPSILON) if "exp_avg_sq" in live else 1.0
    return ((live[""] - saved[""]).square_() * weight).sum(dim=1).sqrt()


class Network:
    """The paper does not say how wide its layers are; these are small enough for a processor."""

    iterations = 2000
    target = CRITERION

    def __init__(self, folder: str) -> None:
        self._images, self._labels = _tensors(folder)

    def reset(self, seed: int) -> None:
        """Start with new weights and another order of the images."""
        torch.manual_seed(seed)
        self._model = nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), lr=0.001, betas=(0.9, 0.999), eps=EPSILON
        )
        self._order = torch.randperm(
            len(self._labels) - WATCHED, generator=torch.Generator().manual_seed(seed)
        )

    def state(self) -> Any:
        """Parameters and both moments."""
        return self._model, self._optimizer

    def step(self, iteration: int) -> None:
        """Train on one batch."""
        first = (iteration - 1) * BATCH % (len(self._order) - BATCH)
        batch = self._order[first : first + BATCH]
        self._optimizer.zero_grad()
        functional.cross_entropy(self._model(self._images[batch]), self._labels[batch]).backward()
        self._optimizer.step()

    @torch.no_grad()
    def metric(self) -> float:
        """Mean cross-entropy over the watched images, the last ones."""
        scores = self._model(self._images[-WATCHED:])
        return float(functional.cross_entropy(scores, self._labels[-WATCHED:]))


@cache
def _tensors(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of one channel from 0 to 1, and labels; read once for all networks."""
    images, labels = mnist(folder)
    return torch.from_numpy(images / np.float32(255)).view(-1, 1, 28, 28), torch.from_numpy(labels)


class ByShard(Network):
    """Every parameter is cut along its first dimension."""

    rows = {"*": 1}  # noqa: RUF012


class ByLayer(Network):
    """Every weight and every bias is one partition."""

    by_layer = True


class ByShardCurved(ByShard):
    """Priority by curvature."""

    norm = staticmethod(curvature)


class ByLayerCurved(ByLayer):
    """Priority by curvature."""

    norm = staticmethod(curvature)


def by_shard(folder: str = "../shared/data") -> Network:
    """Partitions are rows of parameters, priority is by the l2 norm."""
    return ByShard(folder)


def by_layer(folder: str = "../shared/data") -> Network:
    """Partitions are parameters, priority is by the l2 norm."""
    return ByLayer(folder)


def by_shard_curved(folder: str = "../shared/data") -> Network:
    """Partitions are rows of parameters, priority is by curvature."""
    return ByShardCurved(folder)


def by_layer_curved(folder: str = "../shared/data") -> Network:
    """Partitions are parameters, priority is by curvature."""
    return ByLayerCurved(folder)
