"""Train with Lightning, as a user's script does. scarctl takes two lines: an import and a callback."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from data import BATCH, SAID_EVERY, visits
from model import Recommender
from torch.utils.data import DataLoader

import scarctl
from scarctl_adapters.lightning import ScarCallback


class Says(pl.Callback):
    """Says where training is, one line per so many batches."""

    def __init__(self, saving: ScarCallback) -> None:
        self._saving = saving

    def on_train_start(self, trainer: Any, net: Any) -> None:
        """See `Callback`."""
        resumed = self._saving.resumed
        if resumed is not None and resumed.step:
            label = "consistent" if resumed.consistent else f"mixed: {'; '.join(resumed.reasons)}"
            print(f"resumed after step {resumed.step} ({label})", flush=True)

    def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See `Callback`."""
        if (batch_idx + 1) % SAID_EVERY == 0:
            loss = float(trainer.callback_metrics["loss"])
            print(
                f"epoch {trainer.current_epoch + 1}, batch {batch_idx + 1} of {trainer.num_training_batches}, "
                f"step {trainer.global_step}: loss {loss:.3f}",
                flush=True,
            )

    def on_validation_end(self, trainer: Any, net: Any) -> None:
        """See `Callback`."""
        if not trainer.sanity_checking:
            found = float(trainer.callback_metrics["found"])
            print(f"epoch {trainer.current_epoch + 1}: {found:.1%} of the held out items found", flush=True)


def train(store: Path, epochs: int, pairs: int, items: int) -> None:
    """Train, or continue where the run in `store` ended."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    training, held_out, count = visits(items, pairs)
    saving = ScarCallback(store=store, interval=10, partitioning=scarctl.Partitioning(shards=8))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[saving, Says(saving)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Recommender(count)
    trainer.fit(
        net,
        DataLoader(training, batch_size=BATCH, shuffle=True),
        DataLoader(held_out, batch_size=BATCH),
    )
    print(f"done: step {trainer.global_step}, epoch {trainer.current_epoch}", flush=True)
