"""The network that the quickstart trains, and the order of its batches."""

from __future__ import annotations

import torch
from data import Images
from torch import nn

BATCH = 64
LEARNING_RATE = 0.001
"""Batch size and Adam's step as in the paper's experiment (Qiao et al., ICML 2019, appendix C)."""


class Net(nn.Module):
    """Two convolutions with max pooling, three fully connected layers: the paper's network, smaller."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * (side // 4) ** 2, 64)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits, float32 of shape (images, 10), for pixels of shape (images, 1, side, side)."""
        hidden = self.pool(self.conv1(pixels).relu())
        hidden = self.pool(self.conv2(hidden).relu()).flatten(1)
        hidden = self.fc2(self.fc1(hidden).relu()).relu()
        logits: torch.Tensor = self.fc3(hidden)
        return logits


class Batches:
    """Batches by the number of the iteration: the same number is the same batch, in every run with this seed."""

    def __init__(self, images: Images, seed: int) -> None:
        self.images = images
        self.seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __getitem__(self, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels and labels of iteration 0, 1, 2, ...; the order is drawn anew for each pass over the images."""
        per_epoch = len(self.images) // BATCH
        epoch, place = divmod(iteration, per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self.images), generator=generator)
            self._epoch = epoch
        rows = self._order[place * BATCH : (place + 1) * BATCH]
        return self.images.pixels[rows], self.images.labels[rows]


def build(images: Images, seed: int) -> tuple[Net, torch.optim.Adam]:
    """A fresh network and its optimizer; the same seed gives the same numbers."""
    torch.manual_seed(seed)
    model = Net(images.side)
    return model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def train_step(model: Net, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """One iteration; returns the batch's loss."""
    pixels, labels = batch
    loss = nn.functional.cross_entropy(model(pixels), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def full_loss(model: Net, images: Images) -> float:
    """Mean cross-entropy over all images."""
    return float(nn.functional.cross_entropy(model(images.pixels), images.labels))
