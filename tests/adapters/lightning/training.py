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
from torch import nn
from torch.utils.data import DataLoader

from scarctl.testing import Training, Visit
from scarctl_adapters.lightning import ScarCallback
from tests.adapters.lightning.fits import QUIET


class Module(pl.LightningModule):
    """Draw from all three global generators in every iteration."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(4, 5 if variant == "changed" else 3)
        self.several = variant == "several-optimizers"
        self.automatic_optimization = not self.several

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        ids = torch.cat([torch.randperm(8), batch % 8])
        loss = self.out(self.drop(self.norm(self.embed(ids)))).square().mean()
        loss = loss * random.uniform(0.5, 1.0) * np.random.uniform(0.5, 1.0)
        if self.several:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                optimizer.step()
                schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.several:
            optimizers: list[torch.optim.Optimizer] = [
                torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9),
                torch.optim.AdamW(parameters[1:], lr=0.01),
            ]
        else:
            optimizers = [torch.optim.Adam(parameters, lr=0.01)]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
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


class LightningTraining(Training):
    """Return four batches per epoch, in another order each time."""

    def __init__(self, variant: str) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.module = Module(variant)
        self.accumulate = 2 if variant == "accumulation" else 1
        self.steps = {"step": 0}

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        warnings.simplefilter("ignore")
        mode = {"mode": "resume"}
        saving = ScarCallback(store, **{mode.get(k, k): v for k, v in resume.items()}, **options)
        settings = {**QUIET, "max_steps": until * (2 if self.module.several else 1), "max_epochs": -1}
        trainer = pl.Trainer(
            **settings, accumulate_grad_batches=self.accumulate, callbacks=[saving, Visitor(saving, visit)]
        )
        trainer.fit(self.module, DataLoader(torch.arange(16), batch_size=4, shuffle=True))

    def values(self) -> Mapping[str, Any]:
        found: dict[str, Any] = dict(self.module.state_dict())
        for name, parameter in self.module.named_parameters():
            for optimizer in self._optimizers():
                slots = optimizer.state.get(parameter, {})
                found |= {f"{name}/{slot}": value for slot, value in slots.items() if slot != "step"}
        return found

    def extras(self) -> Mapping[str, Any]:
        optimizers = self._optimizers()
        return {
            "steps": [[s["step"] for s in o.state.values() if "step" in s] for o in optimizers],
            "rates": [[group["lr"] for group in o.param_groups] for o in optimizers],
        }

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        attached = self.module._trainer is not None
        return list(self.module.trainer.optimizers) if attached else []
