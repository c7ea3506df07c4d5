"""Predict the next item: two tables of embeddings, and nothing else. A batch touches few of their rows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional


class Recommender(pl.LightningModule):
    """A visitor is the mean of what was looked at last; the nearest items are recommended."""

    def __init__(self, items: int, width: int = 32) -> None:
        super().__init__()
        self.looked_at, self.offered = nn.Embedding(items, width), nn.Embedding(items, width)
        for table in (self.looked_at, self.offered):
            nn.init.normal_(table.weight, std=width**-0.5)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        """Visitors, float32 of shape (batch, width), for int64 of shape (batch, 5)."""
        return self.looked_at(history).mean(1)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of the next item against those of the other visitors in the batch."""
        history, following = batch
        scores = self(history) @ self.offered(following).T
        same = following[:, None] == following[None, :]
        same.fill_diagonal_(False)
        right = torch.arange(len(following), device=scores.device)
        loss = functional.cross_entropy(scores.masked_fill(same, -torch.inf), right)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log how often the next item is among the twenty that are recommended, out of all."""
        history, following = batch
        best = (self(history) @ self.offered.weight.T).topk(20).indices
        self.log("found", (best == following[:, None]).any(1).float().mean())

    def configure_optimizers(self) -> Any:
        """Adagrad moves only the rows that a batch has touched, and so do partial checkpoints."""
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=300)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
