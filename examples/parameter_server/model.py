"""Define the network of *Training Through Failure* on Fashion-MNIST, and a worker's gradient of it, as flat vectors."""

from __future__ import annotations

import gzip
import struct
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

import scarctl

Vector = NDArray[np.float32]
BATCH, WATCHED = 32, 1000


class Network:
    """Two convolutions of 16 and 32 filters, a full layer of 512, a quarter dropped out, 10 classes."""

    def __init__(self, folder: str, seed: int) -> None:
        self.images, self.labels = _data(folder, "train")
        self.tests, self.answers = (values[:WATCHED] for values in _data(folder, "t10k"))
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(32 * 7 * 7, 512), nn.ReLU(), nn.Dropout(0.25), nn.Linear(512, 10),
        )  # fmt: skip
        self._order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))

    def vector(self) -> Vector:
        """Return all parameters."""
        found: Vector = nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy().copy()
        return found

    def gradient(self, weights: Vector, batch: int) -> Vector:
        """Return the gradient of batch `batch` at these weights."""
        nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), self.model.parameters())
        first = batch * BATCH % (len(self._order) - BATCH)
        chosen = self._order[first : first + BATCH]
        self.model.train()
        loss = functional.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])
        parts = torch.autograd.grad(loss, list(self.model.parameters()))
        return np.concatenate([part.numpy().reshape(-1) for part in parts])

    @torch.no_grad()
    def accuracy(self, weights: Vector) -> float:
        """Part of the first 1,000 test images that is classified correctly."""
        nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), self.model.parameters())
        self.model.eval()
        return float((self.model(self.tests).argmax(dim=1) == self.answers).float().mean())


@cache
def _data(folder: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = _read(folder, f"{part}-images-idx3-ubyte.gz").astype(np.float32) / 255
    labels = _read(folder, f"{part}-labels-idx1-ubyte.gz").astype(np.int64)
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels)


def _read(folder: str, name: str) -> NDArray[np.uint8]:
    path = next((p for p in (Path(folder, "fashion-mnist", name), Path(folder, name)) if p.is_file()), None)
    if path is None:
        raise scarctl.UsageError(
            f"there is no fashion-mnist/{name} in {folder}",
            hint="--data names the folder that has the data sets",
        )
    data = gzip.decompress(path.read_bytes())
    kind, dimensions = struct.unpack(">HBB", data[:4])[1:]
    if kind != 8 or len(data) < 4 + 4 * dimensions:
        raise scarctl.UsageError(f"{path} is not an idx file of bytes")
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
