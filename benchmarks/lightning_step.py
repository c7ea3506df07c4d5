"""Measure the Lightning callback's cost per training step, compared with the bare framework and its ModelCheckpoint.

python benchmarks/lightning_step.py [--rounds 7] [--items 50000] [--cycles 2] [--interval 4] [--sleep 0]
    [--folder DIR]

A recommender: an embedding table of `items` x 64 and a small network, Adam, batches of 256 rows. A step also sleeps
`sleep` seconds, as it would while an accelerator computes; without that the model keeps every core busy. Every arm is
one fit in this process; arms take turns. scarctl saves 1/8 of the state every `interval` steps, ModelCheckpoint all of
it every 8 * interval steps, a cycle: the same bytes per time. The first cycle of a fit is not measured (scarctl's first
checkpoint is of everything), nor is the end; `cycles` cycles between them are.

  none             no checkpoints
  ModelCheckpoint  every_n_train_steps, the last file only
  scarctl          ScarCallback, saving from the host's daemon

One line per arm: time per step as a ratio to the arm without checkpoints of the same round, median over rounds and
range; milliseconds per step, median and range; bytes saved meanwhile.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from timing import arenas, interleaved, parser, print_table, scratch, settle, spread
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scarctl
from scarctl_adapters.lightning import ScarCallback

FULL = 8
BATCH = 256


class Recommender(pl.LightningModule):
    """One large table, of which a batch touches few rows."""

    def __init__(self, items: int, sleep: float = 0.0) -> None:
        super().__init__()
        self.sleep = sleep
        self.table = nn.Embedding(items, 64)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return a regression."""
        time.sleep(self.sleep)
        return (self.net(self.table(batch[0]))[:, 0] - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Dense Adam: all rows move in every step."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Seconds and saved bytes between two steps, both times before that step's checkpoint of ModelCheckpoint."""

    def __init__(self, first: int, last: int, saving: ScarCallback | None) -> None:
        self._first, self._last, self._saving = first, last, saving
        self.seconds, self.nbytes = 0.0, 0

    def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See `Callback`."""
        if trainer.global_step not in (self._first, self._last):
            return
        sign = 1 if trainer.global_step == self._last else -1
        self.seconds += sign * time.perf_counter()
        if self._saving is not None:
            self.nbytes += sign * self._saving.session.stats.saved_bytes


class Arms:
    """The three ways, each with its bytes."""

    def __init__(
        self, folder: Path, arena: str, items: int, cycles: int, interval: int, sleep: float
    ) -> None:
        self.folder, self.arena, self.items, self.sleep = folder, arena, items, sleep
        self.cycles, self.interval, self.cycle = cycles, interval, FULL * interval
        self.saved = dict.fromkeys(("none", "ModelCheckpoint", "scarctl"), 0)
        ids = torch.randint(0, items, ((self.cycle * (1 + cycles) + 1) * BATCH,))
        self.data = TensorDataset(ids, torch.randn(len(ids)))

    def cases(self) -> dict[str, Callable[[], float]]:
        """Return the seconds per step of one fit."""
        return {name: lambda name=name: self._fit(name) for name in self.saved}  # type: ignore[misc]

    def _fit(self, name: str) -> float:
        target = self.folder / "arm"
        saving = None
        callbacks: list[Any] = []
        if name == "scarctl":
            saving = ScarCallback(
                target,
                fraction=1 / FULL,
                interval=self.interval,
                settings=scarctl.Settings(arena_dir=self.arena, on_error="raise"),
            )
            callbacks = [saving]
        elif name == "ModelCheckpoint":
            callbacks = [ModelCheckpoint(target, every_n_train_steps=self.cycle, filename="last")]
        clock = Clock(self.cycle + 1, self.cycle * (1 + self.cycles) + 1, saving)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[*callbacks, clock],
            logger=False,
            enable_checkpointing=name == "ModelCheckpoint",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        settle()
        pl.seed_everything(0)
        trainer.fit(Recommender(self.items, self.sleep), DataLoader(self.data, batch_size=BATCH))
        self.saved[name] = clock.nbytes
        if name == "ModelCheckpoint":
            self.saved[name] = self.cycles * sum(file.stat().st_size for file in target.iterdir())
        shutil.rmtree(target, ignore_errors=True)
        return clock.seconds / (self.cycle * self.cycles)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--items", type=int, default=50_000)
    options.add_argument("--cycles", type=int, default=2)
    options.add_argument("--interval", type=int, default=4)
    options.add_argument("--sleep", type=float, default=0.0)
    options.add_argument("--rounds", type=int, default=7)
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    os.environ["SCARCTL_DAEMON"] = "1"
    with scratch(arguments.folder) as folder, arenas(arguments.folder) as arena:
        arms = Arms(folder, arena, arguments.items, arguments.cycles, arguments.interval, arguments.sleep)
        seconds = interleaved(arms.cases(), arguments.rounds)
    rows = []
    for name, taken in seconds.items():
        ratios = [value / base for value, base in zip(taken, seconds["none"], strict=True)]
        rows.append([name, spread(ratios), spread(taken, 1e-3, 1), f"{arms.saved[name] / 1e6:.0f}"])
    print_table(["checkpoints", "of none", "ms per step", "MB"], rows)
    print(f"{statistics.median(seconds['none']) * 1e3:.1f} ms per step without checkpoints", flush=True)


if __name__ == "__main__":
    main()
