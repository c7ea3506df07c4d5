"""Provide a Trainer for the adapters' suite."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from scarctl.testing import Visit
from scarctl_adapters.transformers import ScarCallback
from tests.adapters.torch.test_conformance import TorchTraining
from tests.adapters.trainer_runs import Net, Rows


class Drawing(Net):
    """Data that draw from all global generators."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        if variant != "tied":
            self.out = nn.Linear(8, 20 if variant == "changed" else 16)
        if variant == "frozen":
            self.embed.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(ids, labels)
        return {**found, "loss": found["loss"] * (1 + random.random() + np.random.rand())}


class Visiting(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A callback that calls the suite, and ends the training in time."""

    def __init__(self, callback: ScarCallback, visit: Visit, until: int) -> None:
        self.callback, self.visit, self.until = callback, visit, until

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.callback.session is not None
        self.visit(self.callback.session)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.until
        self.on_train_begin(args, state, control)


class TrainerTraining(TorchTraining):
    """A Trainer whose schedule does not depend on the length of the training."""

    def __init__(self, variant: str) -> None:
        torch.manual_seed(3)
        self.model = Drawing(variant)
        self.position = {}
        args = TrainingArguments(
            output_dir=tempfile.gettempdir(),  # no files are written there
            max_steps=100,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3 if variant == "accumulation" else 1,
            lr_scheduler_type="cosine",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        self.trainer = Trainer(self.model, args, train_dataset=Rows(24))
        self.trainer.remove_callback(PrinterCallback)
        self.optimizers = [self.trainer.create_optimizer()]
        self.schedulers = []

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        callback = ScarCallback(self.trainer, store=store, **resume, **options)
        self.trainer.add_callback(callback)
        self.trainer.add_callback(Visiting(callback, visit, until))
        self.trainer.train()

    def extras(self) -> Mapping[str, Any]:
        scheduler, step = self.trainer.lr_scheduler, self.trainer.state.global_step
        schedule = scheduler.last_epoch if scheduler is not None else 0
        return {**super().extras(), "schedule": schedule, "global_step": step}
