"""Run small real fits with all sources of randomness, a schedule, accumulation, validation, and an end at any point."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scarctl.config import grouped
from scarctl.state.torch_dtypes import plain
from scarctl_adapters.lightning import ScarCallback

Point = tuple[str, int, int]
"""Where an event happens: "train", "batch_end", "validation" or "epoch_end"; epoch; batch."""

EXACT: dict[str, Any] = grouped(policy="full", fraction=1.0, interval=1, partition_bytes=256)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def kill(_: Point) -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(Exception):
    """The exception that ends a test's fit."""


def interrupt(_: Point) -> None:
    """End this fit."""
    raise Interrupted


class Net(pl.LightningModule):
    """A model with an embedding, batch norm and dropout, whose validation also draws random numbers."""

    def __init__(self, at: Point | None = None, then: Callable[[Point], None] = interrupt) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(8, 4)
        self.seen: list[list[int]] = []
        """Every batch used for training."""
        self.validated: list[float] = []
        self._at, self._then = at, then

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.embed(ids))))  # type: ignore[no-any-return]

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids).float().square().mean()

    def reach(self, what: str, batch: int) -> None:
        """Call the test's event if it is due here."""
        point = (what, self.current_epoch, batch)
        if point == self._at and not self.trainer.sanity_checking:
            self._then(point)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.reach("train", batch_idx)
        self.seen.append(batch[0].tolist())
        return self.loss(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reach("batch_end", batch_idx)

    def on_train_epoch_end(self) -> None:
        self.reach("epoch_end", 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("validation", batch_idx)
        loss = self.loss(batch[0]) + torch.rand(())
        self.log("validation", loss)
        if not self.trainer.sanity_checking:
            self.validated.append(float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PlateauNet(Net):
    """A fit with a schedule that waits for a validation metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validation"}}


class ManualNet(Net):
    """A fit with two optimizers, one of which steps only in every third batch, and two schedules stepped by hand."""

    def __init__(self, at: Point | None = None, then: Callable[[Point], None] = interrupt) -> None:
        super().__init__(at, then)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.reach("train", batch_idx)
        self.seen.append(batch[0].tolist())
        often, seldom = self.optimizers()
        often.zero_grad()
        seldom.zero_grad()
        self.manual_backward(self.loss(batch[0]))
        often.step()
        if batch_idx % 3 == 2:
            seldom.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        often = torch.optim.Adam([*self.embed.parameters(), *self.norm.parameters()], lr=0.01)
        seldom = torch.optim.SGD(self.out.parameters(), lr=0.1, momentum=0.9)
        return [often, seldom], [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in (often, seldom)]


def numbers(count: int = 22) -> TensorDataset:
    """Data whose batches are all different."""
    return TensorDataset(torch.arange(count) * 7 % 64)


def loader(**options: Any) -> DataLoader[Any]:
    """Return six shuffled batches, the last one shorter."""
    return DataLoader(numbers(), **{"batch_size": 4, "shuffle": True, **options})


def fit(
    kind: type[Net],
    store: Path | None,
    at: Point | None = None,
    then: Callable[[Point], None] = interrupt,
    *,
    train: Any = None,
    callback: dict[str, Any] | None = None,
    callbacks: Any = (),
    ckpt_path: Any = None,
    seed: int = 1,
    **trainer: Any,
) -> tuple[Any, pl.Trainer]:
    """Do what a user's script does: make all objects and train, with a store if one is given."""
    pl.seed_everything(seed)
    net = kind(at, then)
    own = [ScarCallback(store=store, **{**EXACT, **grouped(**(callback or {}))})] if store else []
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2 if net.automatic_optimization else 1}
    made = pl.Trainer(**{**QUIET, **settings, **trainer}, callbacks=[*own, *callbacks])
    data = loader() if train is None else train
    made.fit(net, data, DataLoader(numbers(11), batch_size=4), ckpt_path=ckpt_path)
    return net, made


def outcome(net: Net, trainer: pl.Trainer) -> dict[str, Any]:
    """Return everything that a run leaves: bytes of the state by name, counters, learning rates, random numbers."""
    state = {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items()}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for optimizer in trainer.optimizers:
        for parameter, slots in optimizer.state.items():
            for slot, value in slots.items():
                state[f"{names[id(parameter)]}/{slot}"] = str(plain(value))
    epoch_loop = trainer.fit_loop.epoch_loop
    return {
        **state,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "schedules": [str(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "random": torch.get_rng_state().numpy().tobytes(),
        "logged": epoch_loop._batches_that_stepped,
        "batches": str(epoch_loop.batch_progress),
        "validated": str(epoch_loop.val_loop.batch_progress),
        "epochs": str(trainer.fit_loop.epoch_progress),
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of differing parts."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name] != b[name]]


def points(epochs: int = 2, batches: int = 6, validations: int = 3) -> Iterator[Point]:
    """Yield the points before and after every batch, in every validation and at every epoch's end."""
    for epoch in range(epochs):
        for batch in range(batches):
            yield "train", epoch, batch
            yield "batch_end", epoch, batch
        for batch in range(validations):
            yield "validation", epoch, batch
        yield "epoch_end", epoch, 0
