"""Define what the quickstart trains: the network, its optimizer, and the order of the batches."""

from __future__ import annotations

import torch
from data import Images
from torch import nn

BATCH = 64
LEARNING_RATE = 0.001
"""Both as in the paper's experiment (Qiao et al., ICML 2019, appendix C)."""

PIECE = 256


class Net(nn.Module):
    """Two convolutions with max pooling, then three fully connected layers: the paper's network, but narrow."""

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
        hidden = self.pool(self.conv1(pixels)).relu()
        hidden = self.pool(self.conv2(hidden)).relu().flatten(1)
        hidden = self.fc2(self.fc1(hidden).relu()).relu()
        logits: torch.Tensor = self.fc3(hidden)
        return logits


class Batches:
    """Batches by the number of the iteration. The same number is the same batch in every run with this seed.

    So a run that goes back to iteration 96 sees again what it saw after iteration 96, as a real loader would show it.
    """

    def __init__(self, images: Images, seed: int, size: int = BATCH) -> None:
        self._images = images
        self._seed = seed
        self._size = size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __getitem__(self, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels and labels of iteration 1, 2, 3, ...; each pass over the images has an order of its own."""
        epoch, place = divmod(iteration - 1, max(1, len(self._images) // self._size))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self._images), generator=generator)
            self._epoch = epoch
        rows = self._order[place * self._size : (place + 1) * self._size]
        return self._images.pixels[rows], self._images.labels[rows]


def build(images: Images, seed: int) -> tuple[Net, torch.optim.Adam]:
    """Return a fresh network and its optimizer. The same seed gives the same numbers."""
    # A network this small gains nothing from a second thread, and sums in one order are the same everywhere.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Net(images.side)
    return model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def train_step(
    model: Net, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """Return one iteration. Returns the batch's mean cross-entropy."""
    pixels, labels = batch
    loss = nn.functional.cross_entropy(model(pixels), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.inference_mode()
def evaluate(model: Net, images: Images) -> tuple[float, float]:
    """Mean cross-entropy over all images, and the share of them that is named rightly."""
    loss, right = 0.0, 0
    # In pieces that stay in the cache.
    for pixels, labels in zip(images.pixels.split(PIECE), images.labels.split(PIECE), strict=True):
        logits = model(pixels)
        loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(1) == labels).sum())
    return loss / len(images), right / len(images)
