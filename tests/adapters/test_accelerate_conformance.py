"""Run the adapters' suite with an Accelerate loop."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from packaging.version import Version
from torch import nn

from scarctl.testing import AdapterConformance, Training, Visit
from scarctl_adapters.accelerate import attach_and_resume
from tests.adapters.accelerate_runs import forget_accelerators


class LoopTraining(Training):
    """A loop over shuffled data in which every batch draws from all global generators."""

    def __init__(self, variant: str) -> None:
        forget_accelerators()
        backwards = 3 if variant == "accumulation" else 1
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=backwards)
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        embed, out = nn.Embedding(8, 4), nn.Linear(4, 9 if variant == "changed" else 8)
        if variant == "tied":
            out.weight = embed.weight
        if variant == "frozen":
            embed.weight.requires_grad_(False)
        model = nn.Sequential(embed, nn.BatchNorm1d(4), nn.Dropout(0.25), out)
        parameters = list(model.parameters())
        if variant == "several-optimizers":
            optimizers: list[torch.optim.Optimizer] = [
                torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9),
                torch.optim.AdamW(parameters[1:], lr=0.01),
            ]
        else:
            optimizers = [torch.optim.Adam(parameters, lr=0.01)]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
        data = torch.utils.data.TensorDataset(torch.arange(24) % 8)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        self.model, self.loader = self.accelerator.prepare(model, loader)
        self.optimizers = [self.accelerator.prepare(o) for o in optimizers]
        self.schedulers = [self.accelerator.prepare(s) for s in schedulers]

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        with attach_and_resume(self.accelerator, store=store, **resume, **options) as run:
            step = run.resumed.step
            visit(run.session)
            while step < until:
                for (ids,) in run.batches(self.loader):
                    with self.accelerator.accumulate(self.model):
                        loss = nn.functional.cross_entropy(self.model(ids), ids) * (
                            random.random() + np.random.rand()
                        )
                        self.accelerator.backward(loss)
                        for item in (*self.optimizers, *self.schedulers):
                            item.step()
                        for optimizer in self.optimizers:
                            optimizer.zero_grad()
                    if self.accelerator.sync_gradients:
                        step += 1
                        visit(run.session)
                        if step == until:
                            return

    def values(self) -> Mapping[str, Any]:
        slots = {
            f"{o}.{number}.{name}": value
            for o, optimizer in enumerate(self.optimizers)
            for number, state in enumerate(optimizer.state.values())
            for name, value in state.items()
            if name != "step" and value is not None
        }
        return {**self.model.state_dict(), **slots}

    def extras(self) -> Mapping[str, Any]:
        return {
            "steps": [state.get("step") for o in self.optimizers for state in o.state.values()],
            "rates": [group["lr"] for o in self.optimizers for group in o.param_groups],
            "schedules": [scheduler.scheduler.last_epoch for scheduler in self.schedulers],
        }


@pytest.mark.usefixtures("forked_runs")
class TestAccelerate(AdapterConformance):
    variants = frozenset({"tied", "frozen", "accumulation", "several-optimizers"})

    @pytest.fixture(autouse=True)
    def alone(self) -> Iterator[None]:
        yield
        forget_accelerators()

    def test_nothing_of_the_training_outlives_it(self, tmp_path: Path) -> None:
        if Version(accelerate.__version__) < Version("1.15"):
            pytest.skip("older versions keep a loader that was not used up")
        super().test_nothing_of_the_training_outlives_it(tmp_path)

    def training(self, variant: str = "") -> Training:
        return LoopTraining(variant)
