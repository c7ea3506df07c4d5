"""Train with Lightning's Trainer, a shuffled loader, dropout, a schedule and a validation per epoch."""

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scarctl_adapters.lightning import ScarCallback


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(x)
        return scores

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed_everything(0)
    data = TensorDataset(torch.randn(28, 6), torch.randint(3, (28,)))
    loaders = DataLoader(data, 4, shuffle=True), DataLoader(data, 4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callback = ScarCallback(store=sys.argv[1])
    Trainer(max_epochs=50, accelerator="cpu", callbacks=[callback], **quiet).fit(Classifier(), *loaders)
