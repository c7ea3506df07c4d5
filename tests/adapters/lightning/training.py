"""Provide a Lightning fit for the adapters' suite."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from scarctl.testing import Visit
from scarctl_adapters.lightning import ScarCallback
from tests.adapters.lightning.fits import QUIET
from tests.adapters.torch.test_conformance import TorchTraining


class Module(pl.LightningModule):
    """The model of the torch suite. Draw from all three global generators in every iteration."""

    def __init__(self, training: LightningTraining) -> None:
        super().__init__()
        self.net = training.model
        self._made = training.optimizers, training.schedulers
        self.automatic_optimization = len(training.optimizers) == 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        ids = torch.cat([torch.randperm(8), batch % 8])
        loss = self.net(ids).square().mean() * random.uniform(0.5, 1.0) * np.random.uniform(0.5, 1.0)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                optimizer.step()
                schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizers, schedules = self._made
        return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in schedules]


class Visitor(pl.Callback):
    """A callback that calls the suite between two iterations."""

    def __init__(self, saving: ScarCallback, visit: Visit) -> None:
        self._saving, self._visit = saving, visit
        self._step = -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._visit(self._saving.session)
        self._step = self._saving.session.head_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._saving.session.head_step > self._step:
            self._step = self._saving.session.head_step
            self._visit(self._saving.session)


class LightningTraining(TorchTraining):
    """Return four batches per epoch, in another order each time."""

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        warnings.simplefilter("ignore")
        mode = {"mode": "resume"}
        saving = ScarCallback(store, **{mode.get(k, k): v for k, v in resume.items()}, **options)
        settings = {**QUIET, "max_steps": until * len(self.optimizers), "max_epochs": -1}
        trainer = pl.Trainer(
            **settings, accumulate_grad_batches=self.backwards, callbacks=[saving, Visitor(saving, visit)]
        )
        trainer.fit(Module(self), DataLoader(torch.arange(16), batch_size=4, shuffle=True))
